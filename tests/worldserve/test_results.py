"""results/summary.json and docs/results.md: the schema, recording, and that the committed page is fresh."""

import json
import subprocess
from pathlib import Path

import pytest

from worldserve.results import DESCRIPTIONS, PAGE_PATH, SUMMARY_PATH, Figure, current_commit, load, main, record, render

ROOT = Path(__file__).resolve().parents[2]
HOW = {"command": "worldserve x", "commit": "0123456789ab", "date": "2026-11-30"}


def test_the_committed_page_is_what_the_committed_figures_give() -> None:
    figures = load(ROOT / SUMMARY_PATH)
    page = (ROOT / PAGE_PATH).read_text(encoding="utf-8")
    assert page == render(figures), "run `worldserve results render` and commit docs/results.md"


def test_recorded_figures_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "summary.json"
    record("wm.b", 2, path=path, **HOW)
    record("reward.recall", 0.99, 0.97, 1.0, 150, path=path, note="held out", **HOW)
    record("reward.recall", 0.98, 0.96, 0.99, 150, path=path, **HOW)
    figures = load(path)
    assert list(figures) == ["reward.recall", "wm.b"]
    assert figures["reward.recall"] == Figure(0.98, 0.96, 0.99, 150, **HOW)
    assert sorted(path.parent.iterdir()) == [path]
    assert set(json.loads(path.read_text())["wm.b"]) == {
        "value",
        "low",
        "high",
        "n",
        "command",
        "commit",
        "date",
        "note",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": float("nan")}, "value: expected a finite"),
        ({"low": 0.1}, "both or neither"),
        ({"low": 0.6, "high": 0.7}, "low <= value <= high"),
        ({"n": 0}, "n: expected"),
        ({"command": " "}, "command: expected"),
        ({"commit": "HEAD"}, "commit: expected"),
        ({"date": "yesterday"}, "date: expected"),
        ({"note": "two\nlines"}, "one line"),
    ],
)
def test_what_is_not_a_figure_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    values = {"value": 0.5, **HOW, **change}
    with pytest.raises(ValueError, match=message):
        record("a.b", path=tmp_path / "s.json", **values)  # type: ignore[arg-type]
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize("key", ["recall", "Reward.recall", "reward.", "a b.c"])
def test_keys_are_dotted(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="key: expected"):
        record(key, 1.0, path=tmp_path / "s.json", **HOW)


def test_a_broken_file_names_key_and_field(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    record("a.b", 1.0, path=path, **HOW)
    stored = json.loads(path.read_text())
    stored["a.b"]["n"] = -1
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"a\.b\.n: expected"):
        load(path)
    del stored["a.b"]["n"]
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"a\.b: expected exactly"):
        load(path)


def test_the_page_shows_figures_intervals_commands_and_what_is_missing() -> None:
    page = render({"reward.recall": Figure(0.987, 0.96, 1.0, 150, note="one seed", **HOW)})
    assert "| `reward.recall` | 0.987 | 0.96 to 1 | 150 | 2026-11-30, `0123456789ab` |" in page
    assert "one seed. Command: `worldserve x`" in page
    assert all(f"- `{key}`:" in page for key in DESCRIPTIONS)
    assert page.index("## Reward model") < page.index("## Not measured yet")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, page = str(tmp_path / "s.json"), str(tmp_path / "p.md")
    how = ["--command", "x", "--commit", "0123456", "--date", "2026-11-30"]
    assert main(["record", "demo.minutes", "12.5", *how, "--summary", summary]) == 0
    assert main(["render", "--check", "--summary", summary, "--page", page]) == 1
    assert main(["render", "--summary", summary, "--page", page]) == 0
    assert main(["render", "--check", "--summary", summary, "--page", page]) == 0
    assert main(["record", "demo.minutes", "11", *how, "--summary", summary]) == 0
    assert main(["render", "--check", "--summary", summary, "--page", page]) == 1
    assert main(["record", "minutes", "11", *how, "--summary", summary]) == 1
    assert "key: expected" in capsys.readouterr().err


def test_a_changed_working_tree_is_marked(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    clean = current_commit(tmp_path)
    (tmp_path / "file").write_text("2")
    assert current_commit(tmp_path) == clean + "-dirty"
    with pytest.raises(ValueError, match="git repository"):
        current_commit(tmp_path / "nowhere")
