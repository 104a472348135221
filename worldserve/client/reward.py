"""Client of `RewardService`."""

from __future__ import annotations

from collections.abc import Sequence

from worldserve.client.calling import Caller
from worldserve.contract import Contract, fingerprint
from worldserve.messages import ItemError, ScoreItem, ScoreReply
from worldserve.wire import codec
from worldserve.wire.contracts import contract_from_proto
from worldserve.wire.generated import reward_pb2, reward_pb2_grpc


class RewardClient:
    """A reward server.

    Args:
        target: HOST:PORT.
        timeout_s: deadline of a call, retries included.
    """

    def __init__(self, target: str, timeout_s: float = 60.0) -> None:
        self._caller = Caller(target, timeout_s)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._caller.channel)
        self._contract: Contract | None = None

    def get_contract(self) -> Contract:
        """The server's contract, asked for at each call."""
        reply = self._caller.call(self._stub.GetContract, reward_pb2.RewardServiceGetContractRequest())
        self._contract = contract_from_proto(reply.contract)
        return self._contract

    def score(self, items: Sequence[ScoreItem]) -> list[ScoreReply | ItemError]:
        """Scores clips, in order. Raises ServerAwayError (a ConnectionError) when the server cannot be reached."""
        contract = self._contract or self.get_contract()
        request = reward_pb2.ScoreRequest(
            interface_fingerprint=fingerprint(contract.interface),
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
