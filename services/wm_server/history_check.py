"""Does a world model read its history? Outcomes with the true and with a shuffled history in the second chunk.

    python -m services.wm_server.history_check --weights weights/bwm-mini --data runs/held-out \\
        --reward 127.0.0.1:50053 --out runs/history.json

The second chunk (frames 51 to 100) is where most grasps are decided. It is drawn from the first frame, the actions and
eight history frames, 43 to 50. Here these are the episode's own true ones, or those of another episode: of one in which
the same arm moves, and, as a second column, of any. Pixels alone are exchanged; first frame, poses and actions stay the
episode's own. The model then goes on open loop to frame 200 and the reward server judges.

`outcome_difference` is the balanced accuracy with the true history minus that with the shuffled one of the same arm,
with an interval from a bootstrap over initial states. A model that ignores its history has a difference of 0: its
outcomes follow from first frame and actions alone, and what went wrong in one chunk (a bottle that slipped or tipped
over) is forgotten in the next. An interval that includes 0 says that these episodes do not show that history is read.
A difference below 0 means that true histories mislead the model, as where it was trained on cleaner ones than it gets.
The difference can only be large where the accuracy with the true history is: read both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when torch is imported: threads that spin while they wait starve the other processes of a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import torch
from numpy.typing import NDArray

from services.wm_server import checkpoint
from services.wm_server.dataset import episode_poses
from services.wm_server.devices import move_model, torch_device
from services.wm_server.episodes import EpisodeSubset
from services.wm_server.measure import predict_rest
from services.wm_server.model import WorldModel
from services.wm_server.outcomes import Outcome, as_json, balanced_episodes, outcomes, reward_facts
from services.wm_server.windows import CHUNK_FRAMES, HISTORY_FRAMES
from worldserve.client import CallFailedError, RewardClient
from worldserve.episodes import Episode, EpisodeReader
from worldserve.messages import ItemFailedError

CONFIDENCE, RESAMPLES = 0.90, 10_000
HISTORY = tuple(range(CHUNK_FRAMES - HISTORY_FRAMES + 1, CHUNK_FRAMES + 1))
COLUMNS = ("true", "shuffled_same_arm", "shuffled_any")


@dataclass(frozen=True)
class HistoryCheckConfig:
    """Outcomes with true against shuffled history in the second chunk, as one number with its interval.

    Examples:
        python -m services.wm_server.history_check --weights runs/wm/model --data runs/held-out \\
            --reward 127.0.0.1:50053 --episodes 200 --out runs/history.json
    """

    weights: Path
    """Directory of the world model."""
    data: tuple[Path, ...]
    """Directories of recorded episodes with known success that the model never trained on."""
    reward: str
    """HOST:PORT of the reward server that judges."""
    out: Path
    """JSON file to write."""
    episodes: int = 200
    """Episodes drawn, failures and successes in turn as far as both last."""
    seed: int = 0
    """Of the choice of other episodes' histories, and of the bootstrap."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.episodes < 2 or self.threads < 1:
            raise ValueError(
                f"episodes, threads: expected at least 2 and at least 1; got {self.episodes}, {self.threads}"
            )


def moving_arm(episode: Episode) -> str:
    """The arm whose six joint targets travel further over the episode: "left" or "right"."""
    travelled = np.abs(np.diff(episode.executed_actions.astype(np.float64), axis=0)).sum(0)
    return "left" if travelled[:6].sum() > travelled[7:13].sum() else "right"


def partners(states: Sequence[str], arms: Sequence[str] | None, random: np.random.Generator) -> list[int]:
    """For each episode, one from another initial state, and, where `arms` are given, with the same arm.

    Raises:
        ValueError: for an episode that has no such partner.
    """
    chosen = []
    for position, state in enumerate(states):
        others = [
            other
            for other, candidate in enumerate(states)
            if candidate != state and (arms is None or arms[other] == arms[position])
        ]
        if not others:
            arm = "" if arms is None else f" in which the {arms[position]} arm moves"
            raise ValueError(
                f"episodes: expected at least two initial states{arm}; got {state!r} alone. "
                "Give more --episodes or --data"
            )
        chosen.append(others[int(random.integers(len(others)))])
    return chosen


def with_history(histories: dict[str, NDArray[np.uint8]]) -> Callable[..., NDArray[np.uint8]]:
    """How `outcomes` draws an episode from frame 51 on, after the history `histories[episode_id]` (8, h, w, 3)."""

    def draw(model: WorldModel, episode: Episode, wanted: Sequence[int]) -> NDArray[np.uint8]:
        known = {0: episode.frames_at([0])[0], **dict(zip(HISTORY, histories[episode.episode_id]))}
        poses = episode_poses(episode, model.pose_format)
        return predict_rest(model, known, poses, CHUNK_FRAMES, episode.seed, wanted)

    return draw


def difference(first: Sequence[Outcome], second: Sequence[Outcome], random: np.random.Generator) -> dict[str, float]:
    """Balanced accuracy of `first` minus that of `second` (the same episodes in the same order), with its interval.

    Percentiles of a bootstrap that draws whole initial states, with both columns of each: episodes of one state share
    its difficulty. Draws without a failure or without a success have no balanced accuracy and are left out.
    """
    states = sorted({row.initial_state_id for row in first})
    number = {state: index for index, state in enumerate(states)}
    # By state: failures, successes, then how many of each are right in the first and in the second column.
    counts = np.zeros((len(states), 6))
    for one, other in zip(first, second, strict=True):
        at = counts[number[one.initial_state_id]]
        kind = int(one.success)
        at[kind] += 1
        at[2 + kind] += one.verdict == one.success
        at[4 + kind] += other.verdict == other.success

    def of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        return 0.5 * ((sums[:, 2:4] - sums[:, 4:6]) / sums[:, :2]).sum(1)

    totals = counts.sum(0, keepdims=True)
    if not totals[0, :2].all():
        raise ValueError("episodes: expected failures and successes; got one kind. Give more --episodes or --data")
    sums = random.multinomial(len(states), np.full(len(states), 1.0 / len(states)), size=RESAMPLES) @ counts
    low, high = np.quantile(of(sums[(sums[:, :2] > 0).all(1)]), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    value = {"value": float(of(totals)[0]), "low": float(low), "high": float(high)}
    return {**value, "count": len(states), "confidence": CONFIDENCE}


def check(model: WorldModel, episodes: Sequence[Episode], reward: RewardClient, seed: int = 0) -> dict[str, Any]:
    """The history check of `model` on `episodes`; see the module for what is returned."""
    held = [(episode.episode_id, episode.initial_state_id, moving_arm(episode)) for episode in episodes]
    names, states, arms = (list(column) for column in zip(*held))
    seen = [episode.frames_at(HISTORY) for episode in episodes]
    random = np.random.default_rng([seed, 6])
    sources = {
        "true": list(range(len(names))),
        "shuffled_same_arm": partners(states, arms, random),
        "shuffled_any": partners(states, None, random),
    }
    rows = {}
    for column in COLUMNS:
        histories = {name: seen[source] for name, source in zip(names, sources[column])}
        rows[column] = outcomes(model, episodes, reward, with_history(histories), f"history: {column}")
    result: dict[str, Any] = {column: as_json(rows[column]) for column in COLUMNS}
    for column in COLUMNS[1:]:
        for row, source in zip(result[column]["rows"], sources[column]):
            row["history_of"] = names[source]
    for name, column in (("outcome_difference", COLUMNS[1]), ("outcome_difference_any_episode", COLUMNS[2])):
        result[name] = difference(rows["true"], rows[column], np.random.default_rng([seed, 7]))
    return result


def run(config: HistoryCheckConfig) -> dict[str, Any]:
    """Checks and writes `config.out`, whose directory is made before anything is drawn."""
    if config.out.is_dir():
        raise ValueError(
            f"out: expected the JSON file to write; {config.out} is a directory. Give {config.out}/history.json"
        )
    config.out.parent.mkdir(parents=True, exist_ok=True)
    model = WorldModel.load(config.weights)
    move_model(model, torch_device(config.device))
    reader = EpisodeReader([str(directory) for directory in config.data])
    usable = [i for i, info in enumerate(reader.infos) if info.frames_sha256 and info.length == 201]
    usable = [i for i in usable if reader.infos[i].success is not None]
    episodes = balanced_episodes(EpisodeSubset(reader, usable), config.episodes)
    if {info.success for info in episodes.infos} != {True, False}:
        shown = ", ".join(map(str, config.data))
        raise ValueError(f"data: expected failures and successes of 200 actions with frames in {shown}; got one kind")
    with RewardClient(config.reward) as reward:
        facts = reward_facts(reward)
        result = check(model, episodes, reward, config.seed)
    identity = {
        "target_weights_sha256": model.sha256,
        "sampler_sigmas": list(model.sampler.sigmas),
        "history_noise": model.sampler.history_noise,
        "reward": facts,
        "data": [str(directory) for directory in config.data],
        "episodes": len(episodes),
        "seed": config.seed,
    }
    result["identity"] = identity
    checkpoint.write_json(config.out, result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m services.wm_server.history_check`."""
    import tyro

    config = tyro.cli(HistoryCheckConfig, args=argv, prog="services.wm_server.history_check", description=__doc__)
    torch.set_num_threads(config.threads)
    try:
        result = run(config)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, FloatingPointError, ItemFailedError, CallFailedError) as error:
        print(f"history_check: {error}", file=sys.stderr)
        return 1
    for column in COLUMNS:
        found = result[column]
        print(
            f"{column}: balanced accuracy {found['balanced']:.3f}, fake success {found['fake_success']:.3f} of "
            f"{found['failures']}, recall {found['recall']:.3f} of {found['successes']}"
        )
    found = result["outcome_difference"]
    print(
        f"outcome_difference {found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}] "
        f"({found['confidence']:.0%}, {found['count']} initial states); written to {config.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
