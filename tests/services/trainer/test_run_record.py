"""A run's directory: what may follow what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.policies import FlowPolicy, load_policy, save_policy
from services.trainer.run_record import RunRecord, read_json, read_jsonl
from worldserve import files


def record(out: Path, resume: bool, **settings: object) -> None:
    RunRecord(out, {"seed": 0, "noise_steps": (4,), "out": out, "threads": 1} | settings, resume, {"threads"}).close()


def test_a_resumed_run_keeps_its_settings_but_for_those_that_may_change(tmp_path: Path) -> None:
    record(tmp_path, resume=False)
    record(tmp_path, resume=True, threads=2)
    with pytest.raises(
        ValueError, match=r"  noise_steps: expected \[4\]; got \[0\]\n  seed: expected 0; got 1\n.*another --out"
    ):
        record(tmp_path, resume=True, seed=1, noise_steps=(0,))


def test_a_setting_the_first_start_did_not_know_is_a_change(tmp_path: Path) -> None:
    record(tmp_path, resume=False)
    with pytest.raises(ValueError, match=r"noise_modes: expected nothing \(not recorded\); got 2"):
        record(tmp_path, resume=True, noise_modes=2)


def test_a_resume_without_a_first_start_is_a_first_start(tmp_path: Path) -> None:
    record(tmp_path / "new", resume=True)
    assert (tmp_path / "new" / "config.json").exists()


def test_a_start_that_did_no_iteration_blocks_nothing(tmp_path: Path) -> None:
    record(tmp_path, resume=False)
    record(tmp_path, resume=False, seed=1)
    assert read_json(tmp_path / "config.json")["seed"] == 1


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "episodes.jsonl", "policy/model.safetensors", "checkpoints/.x.7.tmp"]
)
def test_a_run_that_may_have_done_an_iteration_is_not_overwritten(tmp_path: Path, left: str) -> None:
    record(tmp_path, resume=False)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}\n")
    with pytest.raises(FileExistsError, match=r"holds a run\. Give --resume"):
        record(tmp_path, resume=False)


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, {}, resume=False)
    for resume in (False, True):
        with pytest.raises(RuntimeError, match="another process is writing"):
            RunRecord(tmp_path, {}, resume)
    first.close()
    RunRecord(tmp_path, {}, resume=True).close()


# Kills -------------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for SIGKILL: nothing after it runs, for no handler catches it."""


def checkpoints(out: Path, policy: FlowPolicy, count: int, resume: bool = False) -> None:
    """A run of `count` checkpoints; the policy of each differs."""
    started = RunRecord(out, {}, resume)
    optimizer = torch.optim.Adam(policy.value_parameters())
    for iteration in range(count):
        with torch.no_grad():
            policy.value_parameters()[-1].fill_(iteration + 1.0)
        started.log(iteration, {"env/reward": 0.5}, [{"iteration": iteration, "episode": 0}])
        started.checkpoint(iteration + 1, lambda path: save_policy(policy, path, {}), {"policy": optimizer}, {})
    started.close()


def marked(directory: Path) -> float:
    """Which checkpoint the policy in `directory` is of."""
    return float(load_policy(directory).value_parameters()[-1].detach().flatten()[0])


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, directory: Path, version: float) -> None:
    """Ends the process before `directory` gets the name it was prepared for, at that policy's version."""
    replace = files.os.replace

    def killed(source: Path, target: Path) -> None:
        policy = Path(source) if directory.name == "policy" else Path(source) / "policy"
        if Path(target) == directory and marked(policy) == version:
            raise KilledError
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", killed)


def test_a_kill_between_the_renames_of_the_policy_loses_it_not(
    tiny_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        kill_at_rename(patched, tmp_path / "policy", 2.0)
        with pytest.raises(KilledError):
            checkpoints(tmp_path, tiny_policy(), 2)
    assert not (tmp_path / "policy").exists()
    assert marked(tmp_path / "policy") == 2.0  # the newer of the two whole ones beside it
    [cut] = tmp_path.glob(".policy.*.tmp")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert marked(tmp_path / "policy") == 1.0  # the newest is not whole


def test_a_kill_before_a_checkpoint_gets_its_name_loses_it_not(
    tiny_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        kill_at_rename(patched, tmp_path / "checkpoints" / "iteration_0002", 2.0)
        with pytest.raises(KilledError):
            checkpoints(tmp_path, tiny_policy(), 2)
    resumed = RunRecord(tmp_path, {}, resume=True)
    newest = resumed.latest_checkpoint()
    assert newest is not None
    assert (newest.name, marked(newest / "policy")) == ("iteration_0002", 2.0)
    assert [row["iteration"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    resumed.publish(newest)
    assert marked(tmp_path / "policy") == 2.0
    resumed.close()


def test_a_checkpoint_that_is_not_whole_is_not_taken(tiny_policy: Any, tmp_path: Path) -> None:
    checkpoints(tmp_path, tiny_policy(), 1)
    torn = tmp_path / "checkpoints" / ".iteration_0002.77.tmp"
    save_policy(tiny_policy(), torn / "policy", {})  # killed before state.json
    resumed = RunRecord(tmp_path, {}, resume=True)
    assert resumed.latest_checkpoint() == tmp_path / "checkpoints" / "iteration_0001"
    assert not torn.exists()
    resumed.close()


def test_rows_and_curves_after_the_newest_checkpoint_go_when_a_run_is_resumed(tiny_policy: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    checkpoints(tmp_path, tiny_policy(), 2)
    dying = RunRecord(tmp_path, {}, resume=True)
    dying.log(2, {"env/reward": 0.5}, [{"iteration": 2, "episode": 0}])
    dying.close()
    before = set((tmp_path / "tensorboard").iterdir())
    RunRecord(tmp_path, {}, resume=True).close()
    assert [row["iteration"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [row["iteration"] for row in read_jsonl(tmp_path / "episodes.jsonl")] == [0, 1]
    [curves] = set((tmp_path / "tensorboard").iterdir()) - before
    starts = [event for event in EventFileLoader(str(curves)).Load() if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(2, SessionLog.START)]  # purges step 2 on


def test_a_run_that_died_before_its_first_checkpoint_starts_with_no_rows(tmp_path: Path) -> None:
    dying = RunRecord(tmp_path, {}, resume=False)
    dying.log(0, {"env/reward": 0.5}, [{"iteration": 0, "episode": 0}])
    dying.close()
    RunRecord(tmp_path, {}, resume=True).close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == read_jsonl(tmp_path / "episodes.jsonl") == []
