"""The contract: what simulator, world model, reward, data and policy must agree on.

    >>> contract = adjust_bottle("simulator", "tabletop", {})
    >>> contract.interface.timing.chunk_actions
    50

`Interface` must be equal everywhere and is checked by its fingerprint at Reset; `Provenance` says what one server is
and is recorded with every episode. `differences` names the fields in which two of either disagree.
"""

from worldserve.contract.default import adjust_bottle, adjust_bottle_interface
from worldserve.contract.execution import ExecutedActions, execute
from worldserve.contract.fingerprint import Difference, canonical_json, differences, fingerprint
from worldserve.contract.schema import (
    ActionDimension,
    ActionLayout,
    Contract,
    FrameConvention,
    Interface,
    Observation,
    Provenance,
    ResetRule,
    RewardRule,
    TerminationRule,
    Timing,
)
from worldserve.contract.text import contract_from_mapping, contract_to_mapping, from_yaml, to_yaml

__all__ = [
    "ActionDimension",
    "ActionLayout",
    "Contract",
    "Difference",
    "ExecutedActions",
    "FrameConvention",
    "Interface",
    "Observation",
    "Provenance",
    "ResetRule",
    "RewardRule",
    "TerminationRule",
    "Timing",
    "adjust_bottle",
    "adjust_bottle_interface",
    "canonical_json",
    "contract_from_mapping",
    "contract_to_mapping",
    "differences",
    "execute",
    "fingerprint",
    "from_yaml",
    "to_yaml",
]
