"""A run is held to its settings and to what lies at the paths they name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.wm_server.finetune_wm import FinetuneConfig
from services.wm_server.run_settings import hash_of_episodes, refuse_changes, refuse_other_inputs

INPUTS = {
    "data": {"episodes_sha256": "a"},
    "start": {"model_sha256": "b"},
    "codec_of": {"model_sha256": "c"},
    "gate": {"data": {"episodes_sha256": "d"}},
}


def run_in(out: Path, *made: str, inputs: dict[str, Any] | None = None) -> Path:
    """A directory in which `made` exist, and inputs were recorded."""
    for name in ("", *made):
        (out / name).mkdir(parents=True, exist_ok=True)
    if inputs is not None:
        (out / "inputs.json").write_text(json.dumps(inputs))
    return out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data", "data.episodes_sha256: expected 'a'; got 'other'"),
        ("start", "start.model_sha256: expected 'b'; got 'other'"),
        ("codec_of", "codec_of.model_sha256: expected 'c'; got 'other'"),
        ("gate", "gate.data.episodes_sha256: expected 'd'; got 'other'"),
    ],
)
def test_another_input_at_the_same_path_is_refused(tmp_path: Path, name: str, said: str) -> None:
    text = json.dumps({name: INPUTS[name]})
    changed = json.loads(text.replace(text[text.rindex(": ") + 2 : text.index("}")], '"other"'))
    out = run_in(tmp_path, "latents", "model", inputs=INPUTS)
    with pytest.raises(ValueError) as caught:
        refuse_other_inputs(out, "all", {**INPUTS, **changed})
    assert str(caught.value).splitlines()[1] == f"  {said}"
    assert "inputs.json" in str(caught.value)
    assert "another --out" in str(caught.value)
    assert refuse_other_inputs(out, "measure", changed)  # may be given other data


def test_inputs_that_nothing_was_made_from_may_change(tmp_path: Path) -> None:
    other = {"data": {"episodes_sha256": "x"}, "gate": {"data": {"episodes_sha256": "y"}}}
    assert refuse_other_inputs(run_in(tmp_path / "new", inputs=INPUTS), "all", other)["data.episodes_sha256"] == "x"
    encoded = run_in(tmp_path / "encoded", "latents", inputs=INPUTS)
    assert refuse_other_inputs(encoded, "all", {"gate": other["gate"]})["data.episodes_sha256"] == "a"


def test_a_run_without_recorded_hashes_goes_on_and_has_them_then(tmp_path: Path) -> None:
    out = run_in(tmp_path / "older", "latents", "model")
    assert refuse_other_inputs(out, "all", INPUTS)["start.model_sha256"] == "b"


def test_the_hash_is_of_ids_frames_and_success() -> None:
    facts: dict[str, Any] = {"episode_id": "e", "frames_sha256": "f", "success": True}
    changes = ({}, {"episode_id": "x"}, {"frames_sha256": "x"}, {"success": False}, {"success": None})
    hashes = {hash_of_episodes([SimpleNamespace(**{**facts, **change})]) for change in changes}  # type: ignore[list-item]
    assert len(hashes) == 5
    assert hash_of_episodes([SimpleNamespace(**facts, seed=3)]) in hashes  # type: ignore[list-item]


def test_settings_added_since_a_run_was_made(tmp_path: Path) -> None:
    """Before there was a choice, poses were scaled by percentiles and no hands were projected."""
    out = run_in(tmp_path / "run", "latents", "model")
    config = dataclasses.asdict(FinetuneConfig(out=out, data=(tmp_path,), normalisation="percentiles"))
    recorded = json.loads(json.dumps(config, default=str))
    del recorded["normalisation"], recorded["transformer"]["model"]["pose_map_channels"]
    (out / "config.json").write_text(json.dumps(recorded))
    refuse_changes(out, "all", config)
    with pytest.raises(ValueError, match=r"normalisation: expected 'percentiles' .* got 'workspace'"):
        refuse_changes(out, "all", {**config, "normalisation": "workspace"})
