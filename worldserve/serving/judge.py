"""The reward service as an environment sees it."""

from __future__ import annotations

from collections.abc import Sequence

from worldserve.client import RewardClient
from worldserve.contract import Contract
from worldserve.messages import ItemError, ScoreItem, ScoreReply


class RemoteJudge:
    """A `Judge` over the wire.

    Args:
        target: HOST:PORT of a reward server.
        timeout_s: deadline of one call.
    """

    def __init__(self, target: str, timeout_s: float = 60.0) -> None:
        self._client = RewardClient(target, timeout_s=timeout_s)

    def contract(self) -> Contract:
        """The reward server's contract."""
        return self._client.get_contract()

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreReply | ItemError]:
        """Scores clips. Raises ConnectionError when the server cannot be reached."""
        return self._client.score(items)

    def close(self) -> None:
        """Closes the channel."""
        self._client.close()
