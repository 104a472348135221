"""Client of `RewardService`."""

from __future__ import annotations

from collections.abc import Sequence

from worldserve.client.calling import Caller
from worldserve.contract import Contract, Interface, adjust_bottle_interface, fingerprint
from worldserve.messages import ItemError, ScoreItem, ScoreReply
from worldserve.wire import codec
from worldserve.wire.contracts import contract_from_proto
from worldserve.wire.generated import reward_pb2, reward_pb2_grpc


class RewardClient:
    """A reward server.

    Args:
        target: HOST:PORT.
        timeout_s: deadline of a call, retries included.
        interface: what the caller's frames follow; None takes the default task's. The server refuses any other than
            its own.
    """

    def __init__(self, target: str, timeout_s: float = 60.0, interface: Interface | None = None) -> None:
        self._caller = Caller(target, timeout_s, "RewardService", "a simulator or a world model")
        self._stub = reward_pb2_grpc.RewardServiceStub(self._caller.channel)
        self._fingerprint = fingerprint(interface or adjust_bottle_interface())

    def get_contract(self) -> Contract:
        """The server's contract, asked for at each call."""
        reply = self._caller.call(self._stub.GetContract, reward_pb2.RewardServiceGetContractRequest())
        return contract_from_proto(reply.contract)

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreReply | ItemError]:
        """Scores clips, in order. Raises ServerAwayError (a ConnectionError) when the server cannot be reached."""
        request = reward_pb2.ScoreRequest(
            interface_fingerprint=self._fingerprint,
            items=[codec.score_item_to_proto(item) for item in items],
        )
        reply = self._caller.call(self._stub.Score, request)
        return [
            codec.score_reply_from_proto(result.reply)
            if result.HasField("reply")
            else codec.error_from_proto(result.error)
            for result in reply.results
        ]

    def close(self) -> None:
        """Closes the channel."""
        self._caller.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
