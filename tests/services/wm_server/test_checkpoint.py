import os
import shutil

import pytest
import torch

from services.wm_server import checkpoint


def trained(steps: int) -> tuple[dict[str, torch.nn.Module], torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model}, optimizer


def save(directory, steps: int) -> None:
    checkpoint.save_training(directory, *trained(steps), {"step": steps})


def loaded_step(directory) -> int | None:
    """The step that is resumed; its weights must be those of that step."""
    models, optimizer = trained(0)
    found = checkpoint.load_training(directory, models, optimizer)
    if found is None:
        return None
    expected, _ = trained(found["step"])
    torch.testing.assert_close(models["model"].state_dict(), expected["model"].state_dict())
    assert int(optimizer.state_dict()["state"][0]["step"]) == found["step"]
    return found["step"]


def test_what_was_saved_last_is_loaded(tmp_path):
    assert loaded_step(tmp_path / "checkpoint") is None
    assert not checkpoint.has_training(tmp_path / "checkpoint")
    for steps in (1, 2):
        save(tmp_path / "checkpoint", steps)
    assert loaded_step(tmp_path / "checkpoint") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("kill_at_rename_to", "resumed"),
    [(".old", 1), ("checkpoint", 2)],
    ids=["before the old one steps aside", "between the two renames"],
)
def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path, monkeypatch, kill_at_rename_to, resumed):
    directory = tmp_path / "checkpoint"
    save(directory, 1)
    rename = os.replace

    def killed(source, target):
        if str(target).endswith(kill_at_rename_to):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(directory, 2)
    monkeypatch.undo()
    assert checkpoint.has_training(directory)
    assert loaded_step(directory) == resumed
    save(directory, 3)  # a process that happens to have the killed one's id
    assert loaded_step(directory) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_sibling_cut_short_is_not_taken(tmp_path):
    directory = tmp_path / "checkpoint"
    save(directory, 2)
    shutil.copytree(directory, tmp_path / ".checkpoint.7.tmp")
    (tmp_path / ".checkpoint.7.tmp" / "progress.json").unlink()
    os.replace(directory, tmp_path / ".checkpoint.7.old")
    assert loaded_step(directory) == 2
    os.replace(directory, tmp_path / ".checkpoint.7.old")
    (tmp_path / ".checkpoint.7.old" / "model.safetensors").unlink()
    assert loaded_step(directory) is None
