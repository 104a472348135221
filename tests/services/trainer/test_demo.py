"""The demo's settings and refusals; the loop itself runs in tests/e2e/test_demo.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.trainer import demo
from services.trainer.phases import PhaseClock
from services.trainer.run_record import read_json


@pytest.fixture
def config(tmp_path: Path) -> demo.DemoConfig:
    """A demo over weights that are there; what they hold is not read here."""
    names = ("policy", "world_model", "reward")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    paths = {name: tmp_path / name for name in names}
    return demo.DemoConfig(**paths, recipe="corrected", out=tmp_path / "demo")


def test_missing_weights_are_named_with_the_command_that_makes_them(config: demo.DemoConfig) -> None:
    (config.world_model / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="world_model: worldserve finetune-wm") as caught:
        demo.check_weights(config)
    assert "fit-reward" not in str(caught.value)  # those are there


def test_the_study_sizes_win_over_the_recipe_and_the_rest_is_the_recipe(config: demo.DemoConfig) -> None:
    ppo = demo.ppo_config(config, "127.0.0.1:1")
    assert (ppo.iterations, ppo.critic_warmup_iterations, ppo.episodes_per_iteration) == (14, 4, 96)
    assert (ppo.limit_as, ppo.reward_source, ppo.resume) == ("terminated", "verdict", False)


def test_tiny_is_small_and_goes_to_its_own_directory() -> None:
    config = demo.DemoConfig(tiny=True).sized()
    assert (config.iterations, config.episodes_per_iteration, config.max_states) == (2, 4, 4)
    assert config.directory == Path("runs/demo-tiny")


def test_ppo_goes_on_where_it_was(config: demo.DemoConfig) -> None:
    (config.directory / "ppo").mkdir(parents=True)
    (config.directory / "ppo" / "config.json").write_text("{}")
    assert demo.ppo_config(config, "127.0.0.1:1").resume


def test_the_same_demo_resumes(config: demo.DemoConfig) -> None:
    demo.claim_directory(config)
    claimed = (config.directory / "demo.json").read_bytes()
    demo.claim_directory(dataclasses.replace(config, simulator_workers=1))  # workers change no result
    assert (config.directory / "demo.json").read_bytes() == claimed


def test_another_demo_in_the_same_directory_is_refused(config: demo.DemoConfig) -> None:
    demo.claim_directory(config)
    with pytest.raises(ValueError, match=r"seed: expected 0; got 1\nChoose another --out, or --fresh"):
        demo.claim_directory(dataclasses.replace(config, seed=1))


def test_other_weights_are_another_demo(config: demo.DemoConfig) -> None:
    demo.claim_directory(config)
    (config.policy / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="sha256"):
        demo.claim_directory(config)


def test_fresh_throws_an_earlier_demo_away(config: demo.DemoConfig) -> None:
    demo.claim_directory(config)
    (config.directory / "report.html").write_text("old")
    demo.claim_directory(dataclasses.replace(config, seed=1, fresh=True))
    assert not (config.directory / "report.html").exists()
    assert read_json(config.directory / "demo.json")["seed"] == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_that_is_no_demo_is_left_alone(config: demo.DemoConfig, tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds other things"):
        demo.claim_directory(dataclasses.replace(config, out=tmp_path / "home", fresh=fresh))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_what_a_killed_call_left_of_its_first_file_is_no_other_thing(config: demo.DemoConfig) -> None:
    config.directory.mkdir()
    (config.directory / ".demo.json.77.tmp").write_text("{")
    demo.claim_directory(config)
    assert read_json(config.directory / "demo.json")["seed"] == config.seed


def test_what_is_no_policy_claims_no_directory(config: demo.DemoConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"--out": config.directory, "--recipe": config.recipe, "--policy": config.policy}
    more = {"--world-model": config.world_model, "--reward": config.reward}
    assert demo.main([part for flag, value in {**arguments, **more}.items() for part in (flag, str(value))]) == 1
    assert "expected a policy saved by" in capsys.readouterr().err
    assert not config.directory.exists()


def test_the_command_says_what_is_missing(config: demo.DemoConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--policy", "nowhere", "--out", str(config.directory)]) == 1
    assert "nowhere: worldserve sft" in capsys.readouterr().err


def test_phases_add_up_over_resumed_runs_and_interruptions(tmp_path: Path) -> None:
    used = {"simulator": 1.0}
    first = PhaseClock(tmp_path / "phases.json", lambda: used)

    def interrupted() -> None:
        with first.measure("evaluate"):
            used["simulator"] = 3.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    second = PhaseClock(tmp_path / "phases.json", lambda: used)
    with second.measure("evaluate"):
        used.update(simulator=4.5, reward=0.5)  # a server that started meanwhile
    found = read_json(tmp_path / "phases.json")["evaluate"]
    assert found["simulator"] == pytest.approx(2.0 + 1.5)
    assert found["reward"] == pytest.approx(0.5)
    assert found["wall_s"] == second.phases["evaluate"]["wall_s"] > 0.0
