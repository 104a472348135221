"""How much of an outcome can be read off what the critic reads: a linear probe, `worldserve probe-critic`.

    worldserve probe-critic --data runs/policy-b0 runs/policy-b1 --policy weights/policy-sft --out runs/probe.json

A critic cannot explain more than its input holds. For every decision of recorded rollouts (frames 0, 50, 100, 150) a
ridge regression reads the episode's outcome from the features under each `value_input`, on initial states that it was
not fitted on; R2 = 1 - squared error / variance of the outcomes. An R2 near 0 says that no linear critic of that input
can help, whatever its learning rate; one well above the explained variance of a run's critic
(`critic/explained_variance`) says that the critic is badly trained. `between_states` is the share of the outcomes'
variance that the initial state decides: what a perfect reader of the first frame could explain before the policy's
noise is drawn (needs several rollouts of a state).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

from services.trainer.calls import resumable
from services.trainer.json_files import write_json
from services.trainer.statistics import Interval, variance_shares
from worldserve.episodes import EpisodeReader

SUMMARY = "How much of an outcome a linear probe reads off what the critic reads."
INPUTS = ("prefix", "prefix_tokens", "expert")
PENALTIES = tuple(10.0**exponent for exponent in range(-2, 6))


@dataclass(frozen=True)
class ProbeCriticConfig:
    """A linear probe of what the critic reads, on recorded rollouts with known outcomes."""

    data: tuple[Path, ...]
    """Directories of recorded rollouts of the policy, with frames; several rollouts a state for `between_states`."""
    policy: Path = Path("weights/policy-sft")
    """Directory of the policy, or of a run with one."""
    out: Path = Path("runs/probe.json")
    """JSON file to write."""
    episodes: int = 0
    """At most so many episodes, the first ones (0: all)."""
    folds: int = 5
    """Parts that the initial states fall into; each is predicted by a probe of the others."""
    batch: int = 64
    """Observations that the policy encodes at once."""
    seed: int = 0
    """Of the folds, the noise that "expert" starts from, and the bootstrap."""
    confidence: float = 0.90
    """Of the intervals, a bootstrap over initial states."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        for name, least in (("episodes", 0), ("folds", 2), ("batch", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}; got {getattr(self, name)}")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence: expected a number between 0 and 1; got {self.confidence}")


def fold_of_states(states: Sequence[str], folds: int, random: np.random.Generator) -> NDArray[np.int64]:
    """The fold of each episode, (episodes,): all of one state are in one.

    Raises:
        ValueError: for fewer states than folds.
    """
    names = sorted(set(states))
    if len(names) < folds:
        raise ValueError(f"data: expected rollouts of at least {folds} initial states (--folds); got {len(names)}")
    fold = dict(zip(names, random.permutation(np.arange(len(names)) % folds), strict=True))
    return np.array([fold[state] for state in states], dtype=np.int64)


def ridge(
    features: NDArray[np.float64], targets: NDArray[np.float64], penalties: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights (width, penalties) and the intercepts (penalties,) of ridge regressions on standardised features.

    The penalty is multiplied by a hundredth of the episodes' number, so that it means the same for any number of them;
    features that do not vary get the weight 0.
    """
    mean, std = features.mean(0), features.std(0)
    scale = np.divide(1.0, std, out=np.zeros_like(std), where=std > 1e-9 * np.abs(features).max())
    left, singular, right = np.linalg.svd((features - mean) * scale, full_matrices=False)
    projected = left.T @ (targets - targets.mean())
    shrunk = np.stack([singular * projected / (singular**2 + penalty * len(targets) / 100) for penalty in penalties], 1)
    weights = scale[:, None] * (right.T @ shrunk)
    return weights, targets.mean() - mean @ weights


def held_out_predictions(
    features: NDArray[np.float64], targets: NDArray[np.float64], folds: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each episode (episodes,) what a probe says that saw neither it nor any other of its state.

    The penalty of a fold is chosen inside the others: each of them in turn predicted by the rest.
    """
    result = np.empty_like(targets)
    for fold in np.unique(folds):
        inside = folds != fold
        errors = np.zeros(len(PENALTIES))
        for part in np.unique(folds[inside]):
            fit, check = inside & (folds != part), folds == part
            if not fit.any():  # two folds: nothing is left to choose by, so the middle of the range
                continue
            weights, intercept = ridge(features[fit], targets[fit], PENALTIES)
            errors += ((features[check] @ weights + intercept - targets[check, None]) ** 2).sum(0)
        best = int(errors.argmin()) if errors.any() else len(PENALTIES) // 2
        weights, intercept = ridge(features[inside], targets[inside], PENALTIES[best : best + 1])
        result[~inside] = features[~inside] @ weights[:, 0] + intercept[0]
    return result


def explained(
    predictions: NDArray[np.float64],
    targets: NDArray[np.float64],
    states: Sequence[str],
    confidence: float,
    random: np.random.Generator,
    resamples: int = 2000,
) -> Interval:
    """R2 of held-out predictions, and the interval of a bootstrap that draws whole states."""
    number = {state: index for index, state in enumerate(sorted(set(states)))}
    at = np.array([number[state] for state in states])
    # By state: episodes, sum of the outcomes and of their squares, squared errors.
    columns = (np.ones_like(targets), targets, targets**2, (targets - predictions) ** 2)
    sums = np.stack([np.bincount(at, column, len(number)) for column in columns], axis=1)

    def of(total: NDArray[np.float64]) -> NDArray[np.float64]:
        spread = total[..., 2] - total[..., 1] ** 2 / total[..., 0]
        return 1.0 - np.divide(total[..., 3], spread, out=np.full_like(spread, np.nan), where=spread > 1e-12)

    drawn = random.multinomial(len(number), np.full(len(number), 1.0 / len(number)), size=resamples)
    resampled = of(drawn.astype(np.float64) @ sums)
    tail = (1.0 - confidence) / 2.0
    low, high = np.nanquantile(resampled, [tail, 1.0 - tail])
    return Interval(float(of(sums.sum(0))), float(low), float(high), len(number), confidence)


def between_states(outcomes: NDArray[np.float64], states: Sequence[str]) -> float | None:
    """Share of the outcomes' variance that the state decides, from as many rollouts a state as all of them have.

    None where fewer than two states have several.
    """
    by_state: dict[str, list[float]] = {}
    for state, outcome in zip(states, outcomes, strict=True):
        by_state.setdefault(state, []).append(float(outcome))
    several = [found for found in by_state.values() if len(found) > 1]
    if len(several) < 2:
        return None
    repeats = min(map(len, several))
    return variance_shares([found[:repeats] for found in several]).between_states


def features_of(config: ProbeCriticConfig, reader: EpisodeReader, chosen: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Float64 (episodes, decisions, width) by the critic's input."""
    import torch
    from rich.console import Console
    from rich.progress import track

    from services.trainer.policies import PolicyObservation, find_policy, load_policy

    torch.set_num_threads(config.threads)
    policy = load_policy(find_policy(config.policy)).eval()
    chunk = policy.config.chunk_actions
    rows: dict[str, list[NDArray[np.float64]]] = {name: [] for name in INPUTS}
    console = Console(stderr=True)
    per_call = max(1, config.batch // (reader.infos[chosen[0]].length // chunk))
    groups = [chosen[start : start + per_call] for start in range(0, len(chosen), per_call)]
    for group in track(groups, "features", console=console, disable=not console.is_terminal):
        episodes = [reader[index] for index in group]
        at = [list(range(0, episode.action_count, chunk)) for episode in episodes]
        observation = PolicyObservation(
            torch.from_numpy(np.concatenate([e.frames_at(k) for e, k in zip(episodes, at, strict=True)])),
            torch.from_numpy(np.concatenate([e.proprioception[k] for e, k in zip(episodes, at, strict=True)])),
            [episode.instruction for episode, k in zip(episodes, at, strict=True) for _ in k],
        )
        generators = [
            torch.Generator().manual_seed((config.seed << 32) + index * 1000 + number)
            for index, k in zip(group, at, strict=True)
            for number in range(len(k))
        ]
        for name, found in policy.critic_inputs(observation, generators).items():
            rows[name].append(found.double().numpy().reshape(len(group), -1, found.shape[1]))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def run(config: ProbeCriticConfig) -> dict[str, Any]:
    """Measures and writes `config.out`."""
    if config.out.is_dir():
        raise ValueError(f"out: expected the JSON file to write; {config.out} is a directory")
    reader = EpisodeReader([str(directory) for directory in config.data])
    usable = [i for i, info in enumerate(reader.infos) if info.success is not None and info.frames_sha256]
    lengths = {reader.infos[index].length for index in usable}
    if len(lengths) != 1:
        raise ValueError(
            f"data: expected rollouts with frames and known success, all of one length; got {len(usable)} of lengths "
            f"{sorted(lengths)} in {', '.join(map(str, config.data))}"
        )
    usable = usable[: config.episodes or None]
    states = [reader.infos[index].initial_state_id for index in usable]
    outcomes = np.array([float(bool(reader.infos[index].success)) for index in usable])
    if len(set(outcomes)) < 2:
        raise ValueError(
            f"data: expected failures and successes; got {int(outcomes.sum())} of {len(outcomes)} successes"
        )
    folds = fold_of_states(states, config.folds, np.random.default_rng([config.seed, 1]))
    features = features_of(config, reader, usable)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, table in features.items():
        found[name] = []
        for decision in range(table.shape[1]):
            predictions = held_out_predictions(table[:, decision], outcomes, folds)
            random = np.random.default_rng([config.seed, 2])
            interval = explained(predictions, outcomes, states, config.confidence, random)
            found[name].append(dataclasses.asdict(interval))
    result = {
        "r2": found,
        "between_states": between_states(outcomes, states),
        "episodes": len(usable),
        "successes": int(outcomes.sum()),
        "states": len(set(states)),
        "settings": dataclasses.asdict(config),
    }
    write_json(config.out, result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve probe-critic`."""
    config = tyro.cli(ProbeCriticConfig, args=argv, prog="worldserve probe-critic", description=__doc__)
    return resumable("probe-critic", lambda: _show(run(config), config.out), lambda: "interrupted; nothing was written")


def _show(result: dict[str, Any], out: Path) -> int:
    for name, decisions in result["r2"].items():
        cells = ", ".join(f"{d['value']:.3f} [{d['low']:.3f}, {d['high']:.3f}]" for d in decisions)
        print(f"{name:>14}: R2 at decisions 1 to {len(decisions)}: {cells}")
    share = result["between_states"]
    print(
        f"{result['episodes']} rollouts of {result['states']} initial states, {result['successes']} successes; between "
        f"states lies {'an unknown share' if share is None else f'{share:.2f}'} of the variance; written to {out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
