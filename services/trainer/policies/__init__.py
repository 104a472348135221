"""Policies: observation to action chunk, with densities and values for policy-gradient training."""

from services.trainer.policies.checkpoint import find_policy, load_policy, load_weights, policy_age, save_policy
from services.trainer.policies.config import SIZES, FlowPolicyConfig, flow_mini
from services.trainer.policies.flow_policy import FlowPolicy
from services.trainer.policies.network import Prefix
from services.trainer.policies.observation import PolicyEvaluation, PolicyObservation, PolicySample

__all__ = [
    "SIZES",
    "FlowPolicy",
    "FlowPolicyConfig",
    "PolicyEvaluation",
    "PolicyObservation",
    "PolicySample",
    "Prefix",
    "find_policy",
    "flow_mini",
    "load_policy",
    "load_weights",
    "policy_age",
    "save_policy",
]
