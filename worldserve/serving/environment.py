"""`EnvironmentService` over an `EnvironmentEngine`: decodes, calls, encodes; the rules are the engine's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np

from worldserve.contract import differences, fingerprint
from worldserve.messages import (
    FrameSelection,
    ItemError,
    ReplayOutcome,
    ResetItem,
    ResetReply,
    StepItem,
    StepReply,
)
from worldserve.serving import errors
from worldserve.serving.engine import EnvironmentEngine
from worldserve.wire import codec
from worldserve.wire.arrays import ArrayError, array_from_proto
from worldserve.wire.contracts import contract_to_proto, interface_from_proto
from worldserve.wire.generated import environment_pb2, environment_pb2_grpc
from worldserve.wire.options import INLINE_FRAME_BYTES, STREAM_CLIP_BYTES
from worldserve.wire.status import abort

# Waiting for another call's work on the same episode, where the caller set no deadline.
DEFAULT_DEADLINE_S = 600.0
# Episodes that one Replay runs side by side; the rest wait their turn.
REPLAY_BATCH = 8
MAX_ITEMS = 4096


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """One servicer for every backend."""

    def __init__(self, engine: EnvironmentEngine) -> None:
        self._engine = engine
        self._interface_fingerprint = fingerprint(engine.contract.interface)
        self._provenance_fingerprint = fingerprint(engine.contract.provenance)
        observation = engine.contract.interface.observation
        self._frame_bytes = observation.height * observation.width * 3

    def GetContract(
        self, request: environment_pb2.GetContractRequest, context: grpc.ServicerContext
    ) -> environment_pb2.GetContractResponse:
        """The contract and the load."""
        return environment_pb2.GetContractResponse(
            contract=contract_to_proto(self._engine.contract),
            capacity=self._engine.episodes.capacity,
            live=len(self._engine.episodes),
        )

    def Reset(
        self, request: environment_pb2.ResetRequest, context: grpc.ServicerContext
    ) -> environment_pb2.ResetResponse:
        """Opens episodes, for callers of the same interface."""
        self._check_batch(request.items, context)
        refusal = self._refusal(request, request.pinned_provenance_fingerprint)
        if refusal is not None:
            outcomes: list[ResetReply | ItemError] = [refusal] * len(request.items)
        else:
            items = [codec.reset_item_from_proto(item) for item in request.items]
            outcomes = self._engine.reset(items, _deadline(context))
        response = environment_pb2.ResetResponse()
        for outcome in outcomes:
            if isinstance(outcome, ItemError):
                self._count(outcome)
                response.results.add(error=codec.error_to_proto(outcome))
            else:
                response.results.add(reply=codec.reset_reply_to_proto(outcome))
        return response

    def Step(
        self, request: environment_pb2.StepRequest, context: grpc.ServicerContext
    ) -> environment_pb2.StepResponse:
        """Runs a chunk in each of some episodes."""
        self._check_batch(request.items, context)
        items = [self._step_item(position, item) for position, item in enumerate(request.items)]
        items = self._limit_inline(items)
        response = environment_pb2.StepResponse()
        for outcome in self._engine.step(items, _deadline(context)):
            if isinstance(outcome, ItemError):
                self._count(outcome)
                response.results.add(error=codec.error_to_proto(outcome))
            else:
                response.results.add(reply=codec.step_reply_to_proto(outcome))
        return response

    def ReadFrames(
        self, request: environment_pb2.ReadFramesRequest, context: grpc.ServicerContext
    ) -> Iterator[environment_pb2.ReadFramesResponse]:
        """Streams the last reply's frames in clips of a few megabytes."""
        kept = self._engine.kept_frames(request.episode_id, request.chunk_index)
        if isinstance(kept, ItemError):
            self._count(kept)
            abort(context, kept)
        frames, indices = kept
        clip = max(1, STREAM_CLIP_BYTES // max(1, self._frame_bytes))
        for first in range(0, len(frames), clip):
            part = codec.frames_to_proto(frames[first : first + clip], indices[first : first + clip])
            yield environment_pb2.ReadFramesResponse(frames=part)

    def Replay(
        self, request: environment_pb2.ReplayRequest, context: grpc.ServicerContext
    ) -> Iterator[environment_pb2.ReplayResponse]:
        """Replays recorded episodes, a few side by side, and streams each outcome."""
        self._check_batch(request.items, context)
        refusal = self._refusal(request, "")
        for first in range(0, len(request.items), REPLAY_BATCH):
            part = request.items[first : first + REPLAY_BATCH]
            if refusal is not None:
                outcomes: list[ReplayOutcome | ItemError] = [refusal] * len(part)
            else:
                outcomes = self._replay(part, first, context)
            for item, outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, ItemError):
                    self._count(outcome)
                    yield environment_pb2.ReplayResponse(
                        episode_id=item.episode_id, error=codec.error_to_proto(outcome)
                    )
                else:
                    yield environment_pb2.ReplayResponse(
                        episode_id=item.episode_id, reply=codec.replay_outcome_to_proto(outcome)
                    )

    def Close(
        self, request: environment_pb2.CloseRequest, context: grpc.ServicerContext
    ) -> environment_pb2.CloseResponse:
        """Frees episodes."""
        return environment_pb2.CloseResponse(closed=self._engine.close(list(request.episode_ids)))

    def _check_batch(self, items: Sequence[object], context: grpc.ServicerContext) -> None:
        if not 1 <= len(items) <= MAX_ITEMS:
            abort(
                context,
                errors.invalid("items", f"1 to {MAX_ITEMS} items", str(len(items)), "Split the batch.", "BATCH_SIZE"),
            )

    def _refusal(
        self, request: environment_pb2.ResetRequest | environment_pb2.ReplayRequest, pinned: str
    ) -> ItemError | None:
        """Why no item of this caller can be served, if so."""
        if request.interface_fingerprint != self._interface_fingerprint:
            named = ()
            if request.HasField("interface"):
                try:
                    theirs = interface_from_proto(request.interface)
                    named = tuple(differences(self._engine.contract.interface, theirs))
                except ValueError as error:
                    return errors.invalid(
                        "interface", "an interface that makes sense", errors.quote(str(error)),
                        "See `worldserve contract show`.", "INTERFACE_INVALID",
                    )  # fmt: skip
            got = errors.quote(request.interface_fingerprint)
            return errors.interface_mismatch(named, self._interface_fingerprint, got)
        if pinned and pinned != self._provenance_fingerprint:
            return errors.provenance_mismatch(self._provenance_fingerprint, pinned)
        return None

    def _step_item(self, position: int, message: environment_pb2.StepItem) -> StepItem | ItemError:
        name = f"items[{position}]"
        try:
            selection = codec.frame_selection_from_proto(message)
        except ValueError as error:
            return errors.invalid(
                f"{name}.frame_selection", "NONE, LAST, or STRIDE with frame_stride >= 1", errors.quote(str(error)),
                "frame_stride belongs to STRIDE alone.", "FRAME_SELECTION",
            )  # fmt: skip
        try:
            actions = array_from_proto(message.actions, "float32")
        except ArrayError as error:
            reason = "WRONG_DTYPE" if error.expected.startswith("dtype") else "WRONG_SHAPE"
            return errors.invalid(
                f"{name}.actions", error.expected, errors.quote(error.got),
                "Send float32 (chunk_actions, dimensions), little-endian.", reason,
            )  # fmt: skip
        return StepItem(message.episode_id, message.chunk_index, actions, selection)

    def _limit_inline(self, items: list[StepItem | ItemError]) -> list[StepItem | ItemError]:
        """Refuses the items whose inline frames no longer fit the message."""
        used, checked = 0, []
        count = self._engine.contract.interface.timing.chunk_actions
        for position, item in enumerate(items):
            if isinstance(item, StepItem) and not item.frames.stream:
                size = len(item.frames.frame_indices(0, count)) * self._frame_bytes
                used += size
                if used > INLINE_FRAME_BYTES and size > self._frame_bytes:
                    used -= size
                    item = errors.frames_too_large(
                        f"items[{position}].frame_selection", INLINE_FRAME_BYTES, used + size
                    )
            checked.append(item)
        return checked

    def _replay(
        self, part: Sequence[environment_pb2.ReplayItem], first: int, context: grpc.ServicerContext
    ) -> list[ReplayOutcome | ItemError]:
        actions: list[np.ndarray | ItemError] = [self._replay_actions(first + k, item) for k, item in enumerate(part)]
        ids = [f"replay/{time.time_ns()}/{first + k}" for k in range(len(part))]
        runnable = [k for k, rows in enumerate(actions) if not isinstance(rows, ItemError)]
        outcomes: list[ReplayOutcome | ItemError | None] = [a if isinstance(a, ItemError) else None for a in actions]
        hashes = {k: hashlib.sha256() for k in runnable}
        last: dict[int, StepReply] = {}
        totals = dict.fromkeys(runnable, 0.0)
        clipped = dict.fromkeys(runnable, 0)
        try:
            items = [ResetItem(ids[k], part[k].initial_state_id, part[k].seed) for k in runnable]
            for k, reply in zip(list(runnable), self._engine.reset(items, _deadline(context)), strict=True):
                if isinstance(reply, ItemError):
                    outcomes[k] = reply
                else:
                    hashes[k].update(np.ascontiguousarray(reply.frame).data)
            size = self._engine.contract.interface.timing.chunk_actions
            for chunk in range(max((len(actions[k]) // size for k in runnable), default=0)):
                live = [k for k in runnable if outcomes[k] is None and chunk < len(actions[k]) // size]
                if not live or not context.is_active():
                    break
                steps: list[StepItem | ItemError] = [
                    StepItem(ids[k], chunk, actions[k][chunk * size : (chunk + 1) * size], FrameSelection.every(1))
                    for k in live
                ]
                for k, reply in zip(live, self._engine.step(steps, _deadline(context)), strict=True):
                    if isinstance(reply, ItemError):
                        outcomes[k] = reply
                        continue
                    hashes[k].update(np.ascontiguousarray(reply.frames).data)
                    last[k] = reply
                    totals[k] += float(reply.rewards.sum())
                    clipped[k] += reply.clipped_count
        finally:
            self._engine.close(ids)
        for k in runnable:
            if outcomes[k] is None:
                reply = last[k]
                outcomes[k] = ReplayOutcome(
                    part[k].episode_id, reply.elapsed_steps, reply.success, reply.verdict, totals[k],
                    hashes[k].hexdigest(), clipped[k],
                )  # fmt: skip
        return [outcome for outcome in outcomes if outcome is not None]

    def _replay_actions(self, position: int, item: environment_pb2.ReplayItem) -> np.ndarray | ItemError:
        interface, name = self._engine.contract.interface, f"items[{position}].actions"
        try:
            actions = array_from_proto(item.actions, "float32")
        except ArrayError as error:
            return errors.invalid(name, error.expected, errors.quote(error.got), "Send float32.", "WRONG_DTYPE")
        chunk, limit = interface.timing.chunk_actions, interface.termination.limit_actions
        whole = actions.ndim == 2 and actions.shape[1] == interface.action_dimensions
        if not whole or len(actions) % chunk or not 0 < len(actions) <= limit:
            return errors.invalid(
                name, f"({chunk}, {2 * chunk}, .. {limit}; {interface.action_dimensions})", str(actions.shape),
                "Send whole chunks, at most an episode.", "WRONG_SHAPE",
            )  # fmt: skip
        return actions

    def _count(self, error: ItemError) -> None:
        self._engine.metrics.item_errors.labels(error.reason).inc()


def _deadline(context: grpc.ServicerContext) -> float:
    """`time.monotonic()` at the call's deadline."""
    remaining = context.time_remaining()
    return time.monotonic() + min(DEFAULT_DEADLINE_S, DEFAULT_DEADLINE_S if remaining is None else remaining)
