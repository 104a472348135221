import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


class Two(torch.nn.Module):
    """Two layers, in either order."""

    def __init__(self, names: tuple[str, str] = ("first", "second"), width: int = 3) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(width, width))


def optimised(module: torch.nn.Module, steps: int = 1) -> tuple[dict[str, torch.nn.Module], torch.optim.Optimizer]:
    """`module` and its optimiser after steps whose gradients differ from place to place."""
    optimizer = torch.optim.AdamW(module.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {"model": module}, optimizer


def averages(models: dict[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Averaged gradients by the names of their parameters."""
    return {name: optimizer.state[value]["exp_avg"] for name, value in models["model"].named_parameters()}


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(str(path))), str(path))


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


def test_the_optimiser_follows_its_parameters_to_another_order(tmp_path: Path) -> None:
    saved = optimised(Two())
    checkpoint.save_training(tmp_path / "checkpoint", *saved, {"step": 1})
    turned = optimised(Two(("second", "first")), steps=0)
    checkpoint.load_training(tmp_path / "checkpoint", *turned)
    torch.testing.assert_close(averages(*turned), averages(*saved), rtol=0, atol=0)


def test_a_checkpoint_of_an_older_version_names_parameters_by_their_number(tmp_path: Path) -> None:
    saved = optimised(Two())
    checkpoint.save_training(tmp_path / "checkpoint", *saved, {"step": 1})
    numbers = {f"model.{name}": number for number, (name, _) in enumerate(saved[0]["model"].named_parameters())}

    def older(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{numbers[key.rpartition('/')[0]]}/{key.rpartition('/')[2]}": value for key, value in state.items()}

    rewrite(tmp_path / "checkpoint" / "optimizer.safetensors", older)
    again = optimised(Two(), steps=0)
    assert checkpoint.load_training(tmp_path / "checkpoint", *again) == {"step": 1}
    torch.testing.assert_close(averages(*again), averages(*saved), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("optimizer", {"model.first.weight/exp_avg": torch.zeros(2, 3)}, r"exp_avg of model\.first\.weight: expected the shape \(3, 3\); got \(2, 3\)"),
        ("optimizer", {"0/exp_avg_sq": torch.zeros(9)}, r"exp_avg_sq of model\.first\.weight: expected the shape \(3, 3\); got \(9,\)"),
        ("optimizer", {"model.third.weight/exp_avg": torch.zeros(3, 3)}, r"4 parameters; got 'model\.third\.weight/exp_avg'"),
        ("optimizer", {"4/exp_avg": torch.zeros(3)}, "4 parameters; got '4/exp_avg'"),
        ("model", {"third.weight": torch.zeros(3, 3)}, r"1 unknown \(third\.weight\)"),
        ("model", {"first.weight": torch.zeros(2, 3)}, r"1 of another shape \(first\.weight\)"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_network_is_refused(
    tmp_path: Path, file: str, change: dict[str, torch.Tensor], named: str
) -> None:
    checkpoint.save_training(tmp_path / "checkpoint", *optimised(Two()), {"step": 1})
    rewrite(tmp_path / "checkpoint" / f"{file}.safetensors", lambda state: {**state, **change})
    with pytest.raises(ValueError, match=rf"{file}\.safetensors: .*{named}.* another --out"):
        checkpoint.load_training(tmp_path / "checkpoint", *optimised(Two(), steps=0))
