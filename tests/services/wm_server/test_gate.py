"""The stop gate: what passes, what stops, what is kept, and that a kill loses none of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.wm_server import gate as module
from services.wm_server.finetune_wm import Finetune, FinetuneConfig, report
from services.wm_server.gate import GateConfig, StopGate
from services.wm_server.model import WorldModel
from services.wm_server.outcomes import Outcome
from services.wm_server.run_settings import refuse_changes
from services.wm_server.transformer_training import TransformerTrainingConfig
from tests.services.wm_server.conftest import make_episode, make_model
from tests.services.wm_server.test_distributed import run_ranks
from tests.worldserve.serving.conftest import StubScorer
from worldserve.contract import adjust_bottle
from worldserve.episodes import EpisodeWriter, SealedStateError
from worldserve.serving import RunningServer, ServerSettings, start_reward_server


@dataclasses.dataclass
class FadingScorer(StubScorer):
    """Reads success in everything until `left` episodes were judged, and in nothing from then on."""

    left: int = 10**9

    def probabilities(self, frames: np.ndarray) -> np.ndarray:
        self.left -= 1
        return np.full(len(frames), float(self.left >= 0), np.float32)


@pytest.fixture
def served() -> Iterator[Callable[[StubScorer], RunningServer]]:
    running = []

    def start(scorer: StubScorer) -> RunningServer:
        running.append(start_reward_server(scorer, ServerSettings()))
        return running[-1]

    yield start
    for server in running:
        server.stop(0)


def scripted(monkeypatch: pytest.MonkeyPatch, shares: dict[int, tuple[float, float]]) -> list[int]:
    """Evaluations give (recall, fake success) by step; returns the steps that are really drawn."""
    drawn = []

    def outcomes(model: object, episodes: object, client: object, description: str) -> list[Outcome]:
        step = int(description.rsplit(" ", 1)[1])
        drawn.append(step)
        recall, fake = shares[step]
        return [
            Outcome(f"{kind}{n}", "s", kind, n < 100 * share, 0.5)
            for kind, share in ((True, recall), (False, fake))
            for n in range(100)
        ]

    monkeypatch.setattr(module, "outcomes", outcomes)
    return drawn


def make_gate(out: Path, reward: str, steps: int = 100, judge_start: bool = False, **settings: object) -> StopGate:
    (out / "model").mkdir(parents=True, exist_ok=True)
    config = GateConfig(reward=reward, every=10, **settings)  # type: ignore[arg-type]
    gate = StopGate(
        config, out, steps, judge_start, [], lambda average: dataclasses.replace(make_model(), transformer=average)
    )
    gate.save = lambda path, average: gate._model_of(average).save(path, {"seed": int(average.number)})
    gate.check_reward()
    return gate


def network(number: int):
    made = make_model(number).transformer
    made.number = number
    return made


def run_gate(gate: StopGate, steps: list[int]) -> int | None:
    return next((step for step in steps if gate.stops(step, network(step))), None)


CASES = [
    # recall and fake success by step; where it stops; kept by "last" and by "best"
    ({10: (0.9, 0.5), 20: (0.85, 0.3), 30: (0.79, 0.1)}, 30, 20, 20),
    ({10: (0.9, 0.2), 20: (0.85, 0.3), 30: (0.5, 0.1)}, 30, 20, 10),
    ({10: (0.9, 0.3), 20: (0.80, 0.3), 30: (0.85, 0.3)}, None, 30, 10),
    ({10: (0.5, 0.0), 20: (0.9, 0.4), 30: (0.9, 0.5)}, None, 30, 20),
    ({10: (0.5, 0.0), 20: (0.7, 0.0), 30: (0.79, 0.0)}, None, None, None),
]


@pytest.mark.parametrize("choose", ["last", "best"])
@pytest.mark.parametrize(("shares", "stop", "last", "best"), CASES)
def test_where_it_stops_and_what_is_kept(tmp_path, monkeypatch, served, shares, stop, last, best, choose) -> None:
    scripted(monkeypatch, shares)
    gate = make_gate(tmp_path, served(StubScorer()).address, choose=choose)
    assert run_gate(gate, list(shares)) == stop
    kept = best if choose == "best" else last
    verdict = gate.verdict()
    assert (verdict["kept_step"], verdict["stopped_at"]) == (kept, stop)
    held = {path.name for path in (tmp_path / "gate").glob("step_*")}
    assert held == {f"step_{step:06d}" for step in (last, best) if step is not None}
    if kept is None:
        make_model().save(tmp_path / "model", {})
    assert gate.finish() is (kept is not None)
    card = json.loads((tmp_path / "model" / "config.json").read_text())["card"]
    assert card["gate"]["kept_step"] == kept
    assert card["gate"]["why"] == verdict["why"]
    assert WorldModel.load(tmp_path / "model").sha256  # weights and card fit together
    if kept is None:
        assert "no step was at or above the gate of recall 0.8" in verdict["why"]
    else:
        assert card["seed"] == kept
        assert f"step {kept} is kept" in verdict["why"]
    if stop is not None:
        assert f"training stopped at step {stop}, whose recall was {shares[stop][0]:.3f}" in verdict["why"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["step"]) for row in rows] == [("gate", step) for step in shares]
    assert [(row["recall"], row["fake_success"]) for row in rows] == [pytest.approx(value) for value in shares.values()]


def test_a_resumed_gate_draws_nothing_twice_and_stays_stopped(tmp_path, monkeypatch, served) -> None:
    drawn = scripted(monkeypatch, {10: (0.9, 0.5), 20: (0.5, 0.1)})
    address = served(StubScorer()).address
    run_gate(make_gate(tmp_path, address), [10])
    again = make_gate(tmp_path, address)
    assert run_gate(again, [10, 20]) == 20
    assert run_gate(make_gate(tmp_path, address), [20]) == 20
    assert drawn == [10, 20]
    assert make_gate(tmp_path, address).finish()


def test_a_kill_before_the_state_is_written_draws_again(tmp_path, monkeypatch, served) -> None:
    drawn = scripted(monkeypatch, {10: (0.9, 0.5), 20: (0.9, 0.4)})
    address = served(StubScorer()).address
    gate = make_gate(tmp_path, address)
    run_gate(gate, [10])

    def killed(path: Path, value: object) -> None:
        if path.name == "state.json":
            raise KeyboardInterrupt
        original(path, value)

    original = module.checkpoint.write_json
    monkeypatch.setattr(module.checkpoint, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        run_gate(gate, [20])
    monkeypatch.setattr(module.checkpoint, "write_json", original)
    resumed = make_gate(tmp_path, address)
    assert resumed.kept is not None
    assert resumed.kept["step"] == 10
    assert run_gate(resumed, [20]) is None
    assert drawn == [10, 20, 20]
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [10, 20]
    assert not list((tmp_path / "gate").glob(".*"))


def test_another_reward_model_is_refused_and_another_address_is_not(tmp_path, monkeypatch, served) -> None:
    scripted(monkeypatch, {10: (0.9, 0.5)})
    run_gate(make_gate(tmp_path, served(StubScorer()).address), [10])
    make_gate(tmp_path, served(StubScorer()).address)
    other = StubScorer(contract=adjust_bottle("reward_model", "another", {}))
    with pytest.raises(ValueError, match=r"gate\.reward: expected the reward model that judged this run"):
        make_gate(tmp_path, served(other).address)


def test_steps_that_are_judged(tmp_path, served) -> None:
    gate = make_gate(tmp_path, served(StubScorer()).address, steps=25, judge_start=True)
    assert [step for step in range(26) if gate.due(step)] == [0, 10, 20, 25]


@pytest.mark.parametrize("changes", [{"recall": 0.0}, {"recall": 1.1}, {"episodes": 1}, {"every": 0}])
def test_senseless_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"gate.{next(iter(changes))}"):
        GateConfig(**changes)  # type: ignore[arg-type]


def test_a_gate_without_a_judge_is_refused() -> None:
    GateConfig()
    with pytest.raises(
        ValueError, match=r"gate\.reward: expected HOST:PORT .* since gate\.recall, gate\.every were given"
    ):
        GateConfig(recall=0.9, every=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of 96 x 128, which reward servers take. Episodes of validation states in `gate`, of test states in `test`."""
    directory = tmp_path_factory.mktemp("gated")
    contract = adjust_bottle("simulator", "made", {})
    for name, purpose, count in (
        ("data", "train", 4),
        ("gate", "validation", 4),
        ("won", "validation", 1),
        ("test", "test", 1),
    ):
        with EpisodeWriter(directory / name) as writer:
            for number in range(count):
                episode = make_episode(number, success=number % 2 == 0)
                frames = np.repeat(np.repeat(episode.frames, 3, 1), 2, 2)
                state = f"adjust_bottle/{purpose}/{number:04d}"
                facts = {
                    "frame_source": frames,
                    "contract": contract,
                    "initial_state_id": state,
                    "episode_id": f"{name}/{number}",
                }
                writer.append(dataclasses.replace(episode, **facts))
    return directory


def config_of(data: Path, out: Path, reward: str, **gate: object) -> FinetuneConfig:
    if not (data / "start").exists():
        make_model(latent_height=6, latent_width=8).save(data / "start", {})
    return FinetuneConfig(
        out=out, data=(data / "data",), start=data / "start", held_out_fraction=0.5, stage="transformer",
        gate=GateConfig(reward=reward, data=(data / "gate",), episodes=4, every=2, **gate),  # type: ignore[arg-type]
        transformer=TransformerTrainingConfig(batch_size=2, steps=4, checkpoint_steps=3),
    )  # fmt: skip


def test_a_run_is_stopped_by_a_real_reward_server_and_stays_stopped(data, tmp_path, served, capsys) -> None:
    # The start model's four episodes are read as successes, those of step 2 are not.
    address = served(FadingScorer(left=4)).address
    config = config_of(data, tmp_path / "run", address)
    for _ in range(2):
        run = Finetune(config)
        assert run.run()
        assert run.gate_passed
        assert report(run, True) == 0
    assert "step 0 is kept" in capsys.readouterr().out
    config_file = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config_file["card"]["steps"], config_file["card"]["gate"]["stopped_at"]) == (0, 2)
    start, kept = (
        WorldModel.load(path).transformer.state_dict() for path in (data / "start", tmp_path / "run" / "model")
    )
    for name, value in start.items():
        assert (kept[name] == value).all()
    progress = json.loads((tmp_path / "run" / "checkpoint" / "progress.json").read_text())
    assert progress["step"] == 2
    with pytest.raises(ValueError, match=r"gate\.recall: expected 0\.8; got 0\.5"):
        refuse_changes(
            config.out,
            "all",
            dataclasses.asdict(dataclasses.replace(config, gate=dataclasses.replace(config.gate, recall=0.5))),
        )
    with pytest.raises(ValueError, match=r"gate\.reward: expected 'a gate'; got 'no gate'"):
        Finetune(dataclasses.replace(config, gate=GateConfig()))


GATED = """
import dataclasses, sys
from pathlib import Path
import torch
from services.wm_server.distributed import Placement, joined, launched_ranks
from services.wm_server.finetune_wm import Finetune
from tests.services.wm_server import test_gate as case
data, out, reward = sys.argv[1:]
device, ranks = torch.device("cpu"), launched_ranks()
with joined(ranks, device):
    run = Finetune(case.config_of(Path(data), Path(out), reward), Placement(device, "fp32", ranks))
    print(run.run(), run.gate_passed)
"""


def test_two_ranks_end_together_where_the_gate_passed(data, tmp_path, served) -> None:
    address = served(FadingScorer()).address
    config_of(data, tmp_path / "run", address)
    said = run_ranks(GATED, data, tmp_path / "run", address)
    assert [text.splitlines()[-1] for text in said] == ["True True", "True None"]
    card = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["card"]
    assert (card["steps"], card["gate"]["kept_step"]) == (4, 4)


def test_a_run_that_never_reaches_the_gate_fails(data, tmp_path, served, capsys) -> None:
    config = config_of(data, tmp_path / "run", served(FadingScorer(left=0)).address)
    run = Finetune(config)
    assert run.run()
    assert report(run, True) == 1
    assert "no step was at or above gate.recall 0.8" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["card"]["steps"] == 4


def test_refused_before_anything_is_trained(data, tmp_path, served) -> None:
    config = config_of(data, tmp_path / "run", served(StubScorer()).address)
    with pytest.raises(
        ValueError, match=r"gate\.data: expected failures and successes from initial states that are not"
    ):
        Finetune(dataclasses.replace(config, gate=dataclasses.replace(config.gate, data=(data / "won",))))
    with pytest.raises(SealedStateError):
        Finetune(dataclasses.replace(config, gate=dataclasses.replace(config.gate, data=(data / "test",))))
    assert not (tmp_path / "run").exists()
