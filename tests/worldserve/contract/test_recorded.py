"""`worldserve contract diff` of directories: data sets record a contract whole, checkpoints in part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from worldserve.contract import Observation, Timing, adjust_bottle, adjust_bottle_interface, fingerprint, to_yaml
from worldserve.contract.command import main
from worldserve.contract.recorded import PartialInterface, recorded_contract

CONTRACT = adjust_bottle("simulator", "stub", {})
POLICY = {
    "format": "worldserve.flow_policy/1",
    "policy": {
        "chunk_actions": 50, "image_height": 96, "image_width": 128, "action_dimensions": 14,
        "interface_fingerprint": fingerprint(adjust_bottle_interface()),
    },
}  # fmt: skip
WORLD_MODEL = {"format": "worldserve-world-model-1", "transformer": {"latent_height": 6, "latent_width": 8}}


def checkpoint(directory: Path, config: object) -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def data_set(directory: Path, *contracts: object) -> str:
    (directory / "meta" / "contracts").mkdir(parents=True)
    for number, contract in enumerate(contracts):
        (directory / "meta" / "contracts" / f"{number}.yaml").write_text(to_yaml(contract))  # type: ignore[arg-type]
    return str(directory)


def test_a_policy_is_equal_to_what_it_was_trained_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, data = checkpoint(tmp_path / "policy", POLICY), data_set(tmp_path / "data", CONTRACT)
    assert main(["diff", policy, data]) == 0
    assert capsys.readouterr().out == f"equal: {fingerprint(CONTRACT.interface)}\n"


def test_a_policy_of_the_default_task_names_every_field_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dataclasses.replace(
        CONTRACT,
        interface=dataclasses.replace(
            CONTRACT.interface, timing=Timing(chunk_actions=25), observation=Observation(camera="wrist")
        ),
    )
    policy, data = checkpoint(tmp_path / "policy", POLICY), data_set(tmp_path / "data", other)
    assert main(["diff", policy, data]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "timing.chunk_actions: expected 50, got 25",
        'observation.camera: expected "head", got "wrist"',
    ]


def test_an_unknown_fingerprint_is_compared_by_what_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = {**POLICY, "policy": {**POLICY["policy"], "interface_fingerprint": "ab" * 32, "image_height": 240}}  # type: ignore[dict-item]
    policy, data = checkpoint(tmp_path / "policy", stranger), data_set(tmp_path / "data", CONTRACT)
    assert main(["diff", policy, data]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "observation.height: expected 240, got 96",
        f"interface_fingerprint: expected {'ab' * 32}, got {fingerprint(CONTRACT.interface)}",
    ]


def test_a_world_model_says_what_it_does_not_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = checkpoint(tmp_path / "wm" / "model", WORLD_MODEL), data_set(tmp_path / "data", CONTRACT)
    assert main(["diff", str(Path(model).parent), data]) == 0
    captured = capsys.readouterr()
    assert captured.out == "equal: in the fields that both record\n"
    assert "a world model records no interface, only observation.height, observation.width" in captured.err
    assert main(["diff", model, data, "--provenance"]) == 2
    assert "expected a recorded provenance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"format": "somebody else's"}, "expected a policy, a world model or a reward"),
        ({"format": "worldserve.flow_policy/1"}, "expected a checkpoint's settings"),
        (["a list"], "expected a checkpoint's settings"),
    ],
)
def test_what_is_no_checkpoint_is_refused(config: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        recorded_contract(Path(checkpoint(tmp_path / "x", config)))


def test_a_data_set_of_two_contracts_asks_which(tmp_path: Path) -> None:
    directory = data_set(tmp_path / "data", CONTRACT, adjust_bottle("world_model", "stub", {}))
    with pytest.raises(ValueError, match=r"expected a data set of one contract; got 2.*0\.yaml"):
        recorded_contract(Path(directory))


def test_the_shipped_checkpoints_are_read() -> None:
    weights = Path(__file__).resolve().parents[3] / "weights"
    kinds = {name: recorded_contract(weights / name) for name in ("policy-sft", "bwm-mini", "reward")}
    assert {name: found.kind for name, found in kinds.items() if isinstance(found, PartialInterface)} == {
        "policy-sft": "policy",
        "bwm-mini": "world model",
        "reward": "reward",
    }
