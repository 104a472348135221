"""The same actions in simulator and world model, as video.

A policy's episode in the simulator is rolled out again with every frame drawn; the actions that were executed there
then run in the world model from the same initial state. What differs between the halves is the world model's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.evaluate import evaluation_plans
from services.trainer.json_files import read_json, write_json
from services.trainer.plans import EpisodePlan, unique_run_name
from services.trainer.rollout import Client, EpisodeRecord, Policy, collect_rollout
from worldserve.episodes import write_mp4
from worldserve.messages import FrameSelection, ItemError, ItemFailedError, ResetItem, StepItem, StepReply, Verdict

SCALE = 2  # frames are small; players blur what they enlarge
GAP_PIXELS = 8
INDEX = "videos.json"


@dataclass(frozen=True)
class SideBySide:
    """One video, and what each side made of the episode. Peaks are the reward model's highest probability."""

    video: str
    initial_state_id: str
    evaluation_seed: int
    simulator_success: bool | None
    simulator_verdict: bool | None
    simulator_peak: float | None
    world_model_verdict: bool | None
    world_model_peak: float | None


def choose_episodes(rows: Sequence[Mapping[str, Any]], count: int) -> list[tuple[str, int]]:
    """(initial state, evaluation seed) of the first successes and failures, half each while there are any of both."""
    successes = [row for row in rows if row["success"] == 1]
    failures = [row for row in rows if row["success"] != 1]
    wanted = max(count - len(failures), min(len(successes), (count + 1) // 2))
    chosen = [*successes[:wanted], *failures[: count - min(wanted, len(successes))]]
    return [(str(row["initial_state_id"]), int(row["evaluation_seed"])) for row in chosen[:count]]


def make_videos(
    simulator: Client,
    world_model: Client,
    policy: Policy,
    episodes: Sequence[tuple[str, int]],
    directory: Path,
    policy_batch: int = 16,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SideBySide]:
    """Write one H.264 video an episode and an index to `directory`; return what the index holds.

    `episodes` are (initial state, evaluation seed) of `worldserve evaluate`: with the same `policy_batch` the policy
    acts as it did there. What the index already holds for the same episodes is not made again. `on_progress` gets
    (newly done, total).
    """
    found = load_videos(directory)
    if [(video.initial_state_id, video.evaluation_seed) for video in found] == list(episodes):
        on_progress(len(episodes), len(episodes))
        return found
    directory.mkdir(parents=True, exist_ok=True)
    on_progress(0, len(episodes))
    run_name = unique_run_name("videos")
    plans: list[EpisodePlan] = []
    for number, (state, seed) in enumerate(episodes):
        [plan] = evaluation_plans([state], [seed], f"{run_name}/{number}")
        plans.append(dataclasses.replace(plan, index=number))
    videos: list[SideBySide] = []

    def draw(record: EpisodeRecord) -> None:
        frames, verdict = run_actions(world_model, record)
        name = f"{record.plan.index:02d}.mp4"
        write_mp4(directory / name, join_frames(record.frames, frames))
        videos.append(_side_by_side(name, record, verdict))
        on_progress(1, len(episodes))

    rollout = collect_rollout(
        simulator, policy, [], 0, "any", "mean", len(plans), policy_batch=policy_batch, on_episode=draw, plans=plans
    )
    if rollout.failures:
        raise RuntimeError(f"videos: an episode could not be finished: {rollout.failures[0].error}")
    write_json(directory / INDEX, [dataclasses.asdict(video) for video in videos])
    return videos


def load_videos(directory: Path) -> list[SideBySide]:
    """What `make_videos` left in `directory`; none when it did not finish."""
    path = directory / INDEX
    return [SideBySide(**entry) for entry in read_json(path)] if path.exists() else []


def run_actions(client: Client, record: EpisodeRecord) -> tuple[NDArray[np.uint8], Verdict | None]:
    """Run the executed actions of `record` from its initial state: frames uint8 (1 + n, H, W, 3), final verdict."""
    frames, last = run_again(client, record)
    return frames, last.verdict


def run_again(client: Client, record: EpisodeRecord) -> tuple[NDArray[np.uint8], StepReply]:
    """As `run_actions`, with the whole last reply."""
    episode_id, plan = f"{record.plan.episode_id}/again", record.plan
    try:
        reset = _only(client.reset([ResetItem(episode_id, plan.initial_state_id, seed=plan.environment_seed)]))
        frames, last = [reset.frame[None]], None
        for index, reply in enumerate(record.replies):
            item = StepItem(episode_id, index, np.ascontiguousarray(reply.executed_actions), FrameSelection.every(1))
            last = _only(client.step([item]))
            frames.append(last.frames)
        assert isinstance(last, StepReply)
        return np.concatenate(frames), last
    finally:
        client.close_episodes([episode_id])


def join_frames(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two videos uint8 (n, H, W, 3) beside each other, enlarged by SCALE, a white gap between them."""
    if left.shape != right.shape:
        raise ValueError(f"right: expected frames of shape {left.shape} as on the left; got {right.shape}")
    gap = np.full((*left.shape[:2], GAP_PIXELS // SCALE, 3), 255, np.uint8)
    joined = np.concatenate([left, gap, right], axis=2)
    return np.ascontiguousarray(joined.repeat(SCALE, axis=1).repeat(SCALE, axis=2))


def _only(replies: Sequence[Any]) -> Any:
    [reply] = replies
    if isinstance(reply, ItemError):
        raise ItemFailedError([reply])
    return reply


def _side_by_side(name: str, record: EpisodeRecord, drawn: Verdict | None) -> SideBySide:
    last = record.replies[-1]
    return SideBySide(
        video=name,
        initial_state_id=record.plan.initial_state_id,
        evaluation_seed=record.plan.entropy[0],
        simulator_success=last.success,
        simulator_verdict=last.verdict.success if last.verdict else None,
        simulator_peak=last.verdict.peak if last.verdict else None,
        world_model_verdict=drawn.success if drawn else None,
        world_model_peak=drawn.peak if drawn else None,
    )
