"""`grpo`, `store` and `dpo` over a real socket, one after the other: what one writes the next reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.trainer import dpo_command, grpo_command, store_command
from services.trainer.policies import FlowPolicy, flow_mini, load_policy, save_policy
from services.trainer.replay_store import open_store
from services.trainer.run_record import read_json, read_jsonl
from tests.worldserve.serving.conftest import StubBackend
from worldserve.contract import fingerprint
from worldserve.episodes import EpisodeReader, InitialStateSet
from worldserve.serving import RunningServer

ROOT = Path(__file__).parents[3]
GRPO = [
    "--iterations",
    "1",
    "--groups-per-iteration",
    "1",
    "--group-size",
    "8",
    "--max-sampling-rounds",
    "3",
    "--update-epochs",
    "1",
    "--batch",
    "4",
    "--policy-batch",
    "4",
    "--reward-source",
    "success",
    "--learning-rate",
    "1e-6",
    "--noise-level",
    "3.0",
    "--noise-steps",
    "4",
]
DPO = ["--epochs", "1", "--validation-share", "0", "--pairs-per-state", "2", "--microbatch-size", "2", "--draws", "1"]


def test_a_run_is_kept_exported_and_learned_from_again(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = StubBackend().contract
    interface = fingerprint(contract.interface)
    InitialStateSet(InitialStateSet.load(ROOT / "initial_states" / "train").states[:1]).save(tmp_path / "states")
    save_policy(FlowPolicy(flow_mini(interface_fingerprint=interface), 0), tmp_path / "policy", {})
    at = ["--target", server.address]
    paths = ["--policy", str(tmp_path / "policy"), "--initial-states", str(tmp_path / "states")]
    store = str(tmp_path / "store")

    assert grpo_command.main([*at, *paths, *GRPO, "--store", store, "--out", str(tmp_path / "grpo")]) == 0
    [metrics] = read_jsonl(tmp_path / "grpo" / "metrics.jsonl")
    assert metrics["env/groups_kept"] == 1
    assert read_json(tmp_path / "grpo" / "run.json")["starts"][0]["command"] == "worldserve grpo"
    with open_store(store) as kept:
        infos = kept.infos()
        actions = kept.read(infos[0].episode_id).arrays["executed_actions"]
    assert len(infos) == metrics["env/episodes"]
    assert {info.model_version for info in infos} == {fingerprint(contract.provenance)}
    assert {info.success for info in infos} == {0, 1}

    assert store_command.main(["export", store, *at, "--out", str(tmp_path / "data"), "--batch", "3"]) == 0
    assert f"{len(infos)} episodes added, {len(infos)} in all; 0 ended otherwise" in capsys.readouterr().out
    reader = EpisodeReader(tmp_path / "data")
    reader.verify()
    assert [info.success for info in reader.infos] == [info.success == 1 for info in infos]
    assert reader[0].frames.shape == (201, 96, 128, 3)
    assert np.array_equal(reader[0].executed_actions, actions.reshape(200, 14))
    assert store_command.main(["export", store, *at, "--out", str(tmp_path / "data")]) == 0
    assert "0 episodes added" in capsys.readouterr().out  # an interrupted export goes on

    results = []
    for name, source in (("data", ["--data", str(tmp_path / "data")]), ("store", ["--store", store])):
        out = tmp_path / f"dpo-{name}"
        assert dpo_command.main([*source, "--policy", str(tmp_path / "policy"), *DPO, "--out", str(out)]) == 0
        assert load_policy(out / "policy").config.interface_fingerprint == interface
        results.append(read_jsonl(out / "metrics.jsonl")[0]["dpo/chosen_error"])
    assert results[0] == results[1]  # both sources hold the same episodes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "data: expected directories of recorded episodes, or --store; got neither"),
        (["--data", "nowhere"], "nowhere: no data set here"),
    ],
)
def test_dpo_without_episodes_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    save_policy(FlowPolicy(flow_mini(), 0), tmp_path / "policy", {})
    options = ["--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "out")]
    assert dpo_command.main([*arguments, *options]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("main", "shown"), [(grpo_command.main, "--keyframes runs/rollouts"), (dpo_command.main, "--store runs/store")]
)
def test_help_has_examples(main: object, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])  # type: ignore[operator]
    assert shown in capsys.readouterr().out
