"""Clients of the contract: they need grpcio, protobuf and numpy alone."""

from worldserve.client.environment import EnvironmentClient
from worldserve.client.reward import RewardClient

__all__ = ["EnvironmentClient", "RewardClient"]
