"""The stop gate: training ends where the world model no longer draws enough successes as successes.

Training on failures lowers fake success and, when it goes on too long, recall with it. Every so many steps the
averaged weights draw the gate's episodes open loop and the reward server judges them (`outcomes`). The first step whose
recall is below the gate, after one at or above it, stops the run; what is kept is a model at or above it.

Here, in sampling ratios and in splits are success labels used, and nowhere else: no gradient ever sees one.

In OUT/gate: `state.json` (evaluations, who judged, what is kept), `outcomes_STEP.json` (every episode of an evaluation)
and `step_STEP/`, the models that may still be kept. A candidate is written whole before the state names it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from services.wm_server import checkpoint
from services.wm_server.episodes import EpisodeSubset
from services.wm_server.model import WorldModel
from services.wm_server.outcomes import as_json, balanced_episodes, outcomes, reward_facts
from services.wm_server.transformer import BwmTransformer
from worldserve.client import RewardClient
from worldserve.episodes import Episode, EpisodeReader, refuse_for_training


@dataclass(frozen=True)
class GateConfig:
    """When a run stops by itself, and which step it keeps. Frozen: a run does not go on with other values."""

    reward: str = ""
    """HOST:PORT of the reward server that judges; none trains without a gate. On resuming, the server may be elsewhere,
    but must be the same reward model."""
    data: tuple[Path, ...] = ()
    """Directories of recorded episodes that the gate draws; those from initial states that are trained on are left out.
    None draws the run's own held-out episodes."""
    recall: float = 0.80
    """Least share of successes that must be drawn as successes."""
    episodes: int = 160
    """Episodes drawn each time, failures and successes in turn as far as both last."""
    every: int = 250
    """Steps between two evaluations; the last step has one too, and the start model that is fine-tuned."""
    choose: Literal["last", "best"] = "last"
    """Which step at or above the gate is kept: the last one, or the one with the least fake success."""

    def __post_init__(self) -> None:
        if not 0.0 < self.recall <= 1.0:
            raise ValueError(f"gate.recall: expected above 0 and at most 1; got {self.recall!r}")
        if self.episodes < 2 or self.every < 1:
            raise ValueError(
                f"gate.episodes, gate.every: expected at least 2 and at least 1; got {self.episodes}, {self.every}"
            )
        changed = [part.name for part in fields(self) if getattr(self, part.name) != part.default]
        if changed and not self.reward:
            raise ValueError(
                f"gate.reward: expected HOST:PORT of a reward server, since {', '.join('gate.' + n for n in changed)} "
                f"{'was' if len(changed) == 1 else 'were'} given; got none, which trains without a gate. Start "
                "`worldserve serve-reward`, and give its address"
            )


def gate_episodes(config: GateConfig, training: EpisodeSubset, validation: EpisodeSubset) -> EpisodeSubset:
    """The gate's episodes, failures and successes, none from an initial state that is trained on.

    Raises:
        SealedStateError: for test states, which choose nothing.
        ValueError: when failures or successes are missing.
    """
    pool = validation
    if config.data:
        reader = EpisodeReader([str(directory) for directory in config.data])
        refuse_for_training(info.initial_state_id for info in reader.infos)
        trained = {info.initial_state_id for info in training.infos}
        usable = [i for i, info in enumerate(reader.infos) if info.frames_sha256 and info.length == 201]
        pool = EpisodeSubset(reader, [i for i in usable if reader.infos[i].initial_state_id not in trained])
    labels = [info.success for info in pool.infos]
    pool = EpisodeSubset(pool.reader, [i for i, label in zip(pool.positions, labels) if label is not None])
    chosen = balanced_episodes(pool, config.episodes)
    if {info.success for info in chosen.infos} != {True, False}:
        where = ", ".join(map(str, config.data)) or "the held-out episodes"
        raise ValueError(
            "gate.data: expected failures and successes from initial states that are not trained on; got "
            f"{labels.count(False)} failures and {labels.count(True)} successes in {where}. Record rollouts on other "
            "initial states"
        )
    return chosen


class StopGate:
    """The gate of one run; see the module. Made in every rank, asked in rank 0.

    Args:
        config: settings.
        out: directory of the run.
        steps: of the run.
        judge_start: whether step 0 is a model to be judged (fine-tuning).
        episodes: what is drawn.
        model_of: the world model with given averaged weights.

    Attributes:
        save: writes the world model with given averaged weights into a directory, with its card.
    """

    def __init__(
        self,
        config: GateConfig,
        out: Path,
        steps: int,
        judge_start: bool,
        episodes: Sequence[Episode],
        model_of: Callable[[BwmTransformer], WorldModel],
    ) -> None:
        self.config, self.out, self.steps, self.judge_start = config, out, steps, judge_start
        self.episodes, self._model_of = episodes, model_of
        self.save: Callable[[Path, BwmTransformer], None] = lambda path, average: model_of(average).save(path, {})
        self.directory = out / "gate"
        self.evaluations: list[dict[str, Any]] = []
        self.reward: dict[str, Any] = {}
        path = self.directory / "state.json"
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.evaluations, self.reward = state["evaluations"], state["reward"]

    def check_reward(self) -> None:
        """Before anything is trained: the reward server is there, and the one that judged the steps so far.

        Raises:
            ConnectionError: when it is away.
            ValueError: when another one is there.
        """
        with RewardClient(self.config.reward) as client:
            found = reward_facts(client)
        name = "provenance_fingerprint"
        if self.reward and self.reward[name] != found[name]:
            raise ValueError(
                f"gate.reward: expected the reward model that judged this run so far, {name} {self.reward[name]}; got "
                f"{found[name]} at {self.config.reward}. Serve that one, or begin a new run with another --out"
            )
        self.reward = found

    def due(self, step: int) -> bool:
        """Whether `step` is judged."""
        if step == 0:
            return self.judge_start
        return step % self.config.every == 0 or step == self.steps

    def stops(self, step: int, average: BwmTransformer) -> bool:
        """Judges `step`, unless that is done already; True where the run stops here.

        Raises:
            ConnectionError: when the reward server is away; the run goes on from its checkpoint.
        """
        self.evaluations = [row for row in self.evaluations if row["step"] <= step]
        if not any(row["step"] == step for row in self.evaluations):
            self._evaluate(step, average)
        return self.stopped_at is not None

    def _evaluate(self, step: int, average: BwmTransformer) -> None:
        with RewardClient(self.config.reward) as client:
            rows = outcomes(self._model_of(average), self.episodes, client, description=f"gate, step {step}")
        found = as_json(rows)
        checkpoint.write_json(self.directory / f"outcomes_{step:06d}.json", {"step": step, **found})
        row = {name: found[name] for name in ("fake_success", "recall", "failures", "successes")}
        row |= {"step": step, "passed": found["recall"] >= self.config.recall}
        if row["passed"]:
            self._keep_candidate(step, average)
        self.evaluations.append(row)
        metrics = self.out / "metrics.jsonl"
        checkpoint.forget_metrics(metrics, ("gate",), step - 1)
        checkpoint.append_metrics(metrics, {"stage": "gate", **row})
        state: dict[str, Any] = {
            "settings": asdict(self.config),
            "reward": self.reward,
            "evaluations": self.evaluations,
        }
        state |= {"episodes": len(self.episodes), **self.verdict()}
        checkpoint.write_json(self.directory / "state.json", state)
        self._forget_candidates()
        print(
            f"gate, step {step}: recall {row['recall']:.3f} of {row['successes']}, fake success "
            f"{row['fake_success']:.3f} of {row['failures']}; {'at or above' if row['passed'] else 'below'} the gate "
            f"{self.config.recall}"
        )

    def _keep_candidate(self, step: int, average: BwmTransformer) -> None:
        staging = self.directory / f".step_{step:06d}.{os.getpid()}.tmp"
        target = self._candidate(step)
        try:
            self.save(staging, average)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _candidate(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _forget_candidates(self) -> None:
        """Models of steps that are neither the last nor the best any more, and what a kill left."""
        wanted = {self._candidate(row["step"]) for row in (self._last(), self._best()) if row is not None}
        for path in (*self.directory.glob("step_*"), *self.directory.glob(".step_*.tmp")):
            if path not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def stopped_at(self) -> int | None:
        """The first step below the gate after one at or above it; None where there is none."""
        passed = False
        for row in self.evaluations:
            if passed and not row["passed"]:
                step: int = row["step"]
                return step
            passed = passed or row["passed"]
        return None

    def _last(self) -> dict[str, Any] | None:
        return next((row for row in reversed(self.evaluations) if row["passed"]), None)

    def _best(self) -> dict[str, Any] | None:
        """The least fake success; among equals the higher recall, then the later step."""
        passed = [row for row in self.evaluations if row["passed"]]
        return min(passed, key=lambda row: (row["fake_success"], -row["recall"], -row["step"]), default=None)

    @property
    def kept(self) -> dict[str, Any] | None:
        """The evaluation of the step that is kept so far; None where none was at or above the gate."""
        return self._best() if self.config.choose == "best" else self._last()

    def verdict(self) -> dict[str, Any]:
        """`kept_step`, `stopped_at` and `why`, a sentence."""
        kept, stopped, gate = self.kept, self.stopped_at, f"the gate of recall {self.config.recall}"
        if kept is None:
            return {"kept_step": None, "stopped_at": None, "why": f"no step was at or above {gate}"}
        kind = "the least fake success of the steps" if self.config.choose == "best" else "the last step"
        ended = ""
        if stopped is not None:
            below = next(row for row in self.evaluations if row["step"] == stopped)
            ended = f"; training stopped at step {stopped}, whose recall was {below['recall']:.3f}"
        why = (
            f"step {kept['step']} is kept: {kind} at or above {gate} (recall {kept['recall']:.3f} of "
            f"{kept['successes']}, fake success {kept['fake_success']:.3f} of {kept['failures']}){ended}"
        )
        return {"kept_step": kept["step"], "stopped_at": stopped, "why": why}

    def finish(self) -> bool:
        """Puts the kept model into OUT/model, with the reason in its card; False where none passed.

        Then OUT/model stays the newest one, and its card says so. May be repeated after a kill.
        """
        target, verdict = self.out / "model", self.verdict()
        source = target if verdict["kept_step"] is None else self._candidate(verdict["kept_step"])
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        reward = {"reward_provenance_fingerprint": self.reward["provenance_fingerprint"]}
        settings = {name: getattr(self.config, name) for name in ("recall", "episodes", "every", "choose")}
        config["card"]["gate"] = {**verdict, **settings, **reward, "evaluations": self.evaluations}
        if source != target:
            target.mkdir(parents=True, exist_ok=True)
            temporary = target / f".model.safetensors.{os.getpid()}.tmp"
            shutil.copyfile(source / "model.safetensors", temporary)
            os.replace(temporary, target / "model.safetensors")
        checkpoint.write_json(target / "config.json", config)
        print(f"gate: {verdict['why']}")
        return verdict["kept_step"] is not None
