"""Preference pairs of recorded episodes: from one initial state, one that succeeded and one that did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.policies import PolicyObservation

Outcome = Literal["success", "verdict"]


@dataclass(frozen=True)
class RecordedDecisions:
    """N episodes of T decisions: what was seen, which actions were executed, and how the episode ended.

    images uint8 (N, T, H, W, 3); states float32 (N, T, D); actions float32 (N, T, chunk, D), executed targets;
    succeeded bool (N,). instructions, initial_state_ids, episode_ids: N strings.
    """

    images: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    succeeded: NDArray[np.bool_]
    instructions: Sequence[str]
    initial_state_ids: Sequence[str]
    episode_ids: Sequence[str]

    def __len__(self) -> int:
        return len(self.episode_ids)

    @property
    def decisions(self) -> int:
        """Decisions an episode, T."""
        return int(self.actions.shape[1])

    def batch(self, episodes: NDArray[np.int64], decisions: Sequence[int]) -> tuple[PolicyObservation, torch.Tensor]:
        """Observations and actions of these decisions, flat: episode by episode, (len(episodes) * len(decisions),)."""
        rows, columns = np.repeat(episodes, len(decisions)), np.tile(np.asarray(decisions), len(episodes))
        observation = PolicyObservation(
            torch.from_numpy(self.images[rows, columns]),
            torch.from_numpy(self.states[rows, columns]),
            [self.instructions[int(row)] for row in rows],
        )
        return observation, torch.from_numpy(self.actions[rows, columns])

    @staticmethod
    def join(parts: Sequence[RecordedDecisions]) -> RecordedDecisions:
        """Episodes one after the other. Raises ValueError for another number of decisions, or an id twice."""
        shapes = {part.images.shape[1:] + part.actions.shape[1:] for part in parts}
        if len(shapes) != 1:
            raise ValueError(f"data: expected episodes of one shape; got {sorted(shapes)}")
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("images", "states", "actions", "succeeded")
        }
        lists: dict[str, Any] = {
            name: [item for part in parts for item in getattr(part, name)]
            for name in ("instructions", "initial_state_ids", "episode_ids")
        }
        if len(set(lists["episode_ids"])) != len(lists["episode_ids"]):
            raise ValueError("data: expected every episode once; some id occurs twice in what is read together")
        return RecordedDecisions(**arrays, **lists)


def paired_states(outcomes: Sequence[tuple[str, str, bool]]) -> set[tuple[str, str]]:
    """The (initial state, instruction) that have both outcomes."""
    found: dict[tuple[str, str], set[bool]] = {}
    for state, instruction, succeeded in outcomes:
        found.setdefault((state, instruction), set()).add(succeeded)
    return {key for key, seen in found.items() if len(seen) == 2}


def make_pairs(data: RecordedDecisions, pairs_per_state: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Pairs (chosen, rejected) of episode numbers, int64 (P, 2): at most `pairs_per_state` of a state, drawn at random.

    A state's pairs use as many different episodes as they can before one is used again.
    """
    groups: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for number in range(len(data)):
        key = (data.initial_state_ids[number], data.instructions[number])
        groups.setdefault(key, ([], []))[0 if data.succeeded[number] else 1].append(number)
    pairs: list[tuple[int, int]] = []
    for key in sorted(groups):
        chosen, rejected = (random.permutation(group).tolist() for group in groups[key])
        pairs += _every_pair(chosen, rejected)[:pairs_per_state]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _every_pair(chosen: list[int], rejected: list[int]) -> list[tuple[int, int]]:
    """Each pair once, in rounds that use the longer side's members once and the shorter's as evenly as they can."""
    if len(chosen) < len(rejected):
        return [(first, second) for second, first in _every_pair(rejected, chosen)]
    count = len(rejected)
    return [(one, rejected[(at + shift) % count]) for shift in range(count) for at, one in enumerate(chosen)]


def read_episodes(
    directories: Sequence[Path],
    outcome: Outcome,
    chunk_actions: int,
    interface: str = "",
    on_episode: Callable[[int, int], None] = lambda done, total: None,
) -> RecordedDecisions | None:
    """The episodes of directories that can be paired; None where none can. Only decision frames are decoded.

    Raises:
        SealedStateError: for an episode from a sealed test state.
        ValueError: for another `interface` ("": not asked), or episodes of different lengths.
    """
    from worldserve.episodes import EpisodeReader, refuse_for_training

    reader = EpisodeReader(list(directories))
    refuse_for_training(info.initial_state_id for info in reader.infos)
    ended = []
    for info in reader.infos:
        if interface and info.interface_fingerprint not in ("", interface):
            raise ValueError(
                f"data: expected episodes of interface {interface}, for which the policy was trained; "
                f"{info.episode_id} has {info.interface_fingerprint}"
            )
        succeeded = info.success if outcome == "success" else (info.verdict.success if info.verdict else None)
        ended.append(succeeded)
    judged = [(i.initial_state_id, i.instruction, s) for i, s in zip(reader.infos, ended) if s is not None]
    usable = paired_states(judged)
    chosen = [
        position
        for position, info in enumerate(reader.infos)
        if ended[position] is not None and (info.initial_state_id, info.instruction) in usable
    ]
    if not chosen:
        return None
    images, states, actions = [], [], []
    for done, position in enumerate(chosen):
        episode = reader[position]
        count = episode.action_count // chunk_actions
        starts = np.arange(count) * chunk_actions
        images.append(episode.frames_at(starts))
        states.append(episode.proprioception[starts])
        actions.append(episode.executed_actions[: count * chunk_actions].reshape(count, chunk_actions, -1))
        on_episode(done + 1, len(chosen))
    if len(lengths := {len(chunks) for chunks in actions}) > 1:
        raise ValueError(f"data: expected episodes of one length; got {sorted(lengths)} decisions")
    infos = [reader.infos[position] for position in chosen]
    return RecordedDecisions(
        np.stack(images),
        np.stack(states),
        np.stack(actions),
        np.array([bool(ended[position]) for position in chosen]),
        [info.instruction for info in infos],
        [info.initial_state_id for info in infos],
        [info.episode_id for info in infos],
    )


def read_store(where: str, outcome: Outcome, interface: str = "") -> RecordedDecisions | None:
    """As `read_episodes`, from a replay store; episodes with a keyframe start are left out, their start differs."""
    from services.trainer.replay_store import open_store
    from worldserve.episodes import refuse_for_training

    with open_store(where) as store:
        infos = store.infos()
        refuse_for_training(info.initial_state_id for info in infos)
        if other := [info for info in infos if interface and info.interface not in ("", interface)]:
            raise ValueError(
                f"store: expected episodes of interface {interface}, for which the policy was trained; "
                f"{other[0].episode_id} has {other[0].interface}"
            )
        ended = {info.episode_id: getattr(info, outcome) for info in infos}
        judged = [i for i in infos if ended[i.episode_id] >= 0]
        usable = paired_states([(i.initial_state_id, i.instruction, ended[i.episode_id] == 1) for i in judged])
        wanted = [info for info in judged if (info.initial_state_id, info.instruction) in usable]
        episodes = [store.read(info.episode_id) for info in wanted]
    episodes = [episode for episode in episodes if episode.arrays["acted"].all()]
    if not episodes:
        return None
    return RecordedDecisions(
        np.stack([episode.arrays["images"] for episode in episodes]),
        np.stack([episode.arrays["states"] for episode in episodes]),
        np.stack([episode.arrays["executed_actions"] for episode in episodes]),
        np.array([ended[episode.info.episode_id] == 1 for episode in episodes]),
        [episode.info.instruction for episode in episodes],
        [episode.info.initial_state_id for episode in episodes],
        [episode.info.episode_id for episode in episodes],
    )
