"""The reward service as an environment sees it."""

from __future__ import annotations

from collections.abc import Sequence

from worldserve.client import RewardClient
from worldserve.contract import Contract, Interface, differences, fingerprint
from worldserve.messages import ItemError, ScoreItem, ScoreReply
from worldserve.serving import errors


class RemoteJudge:
    """A `Judge` over the wire. It judges by one reward model for its whole life, the one that first answered.

    Args:
        target: HOST:PORT of a reward server.
        timeout_s: deadline of one call, retries included.
        interface: what the frames follow; None takes the default task's.
    """

    def __init__(self, target: str, timeout_s: float = 60.0, interface: Interface | None = None) -> None:
        self._client = RewardClient(target, timeout_s, interface)
        self._target = target
        self._provenance = ""

    def contract(self) -> Contract:
        """The reward server's contract."""
        contract = self._client.get_contract()
        self._provenance = self._provenance or fingerprint(contract.provenance)
        return contract

    def check(self, interface: Interface) -> None:
        """Raises ValueError, naming the fields, unless the reward server's interface is `interface`."""
        found = differences(interface, self.contract().interface)
        if found:
            lines = "\n  ".join(str(difference) for difference in found)
            raise ValueError(f"reward server {self._target}: its interface is another one:\n  {lines}")

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreReply | ItemError]:
        """Scores clips. Raises ConnectionError when the server cannot be reached.

        Each call first asks who answers: a server restarted with other weights would give verdicts that the
        environment's contract does not name.
        """
        answers = fingerprint(self.contract().provenance)
        if answers != self._provenance:
            return [errors.judge_changed("verdict", self._provenance, answers)] * len(items)
        return self._client.score(items)

    def close(self) -> None:
        """Closes the channel."""
        self._client.close()
