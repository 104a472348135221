"""The page about a run: what it says of given figures, and that it needs nothing but itself."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer import report
from services.trainer.side_by_side import SideBySide
from worldserve.episodes import write_mp4


def interval(value: float, low: float, high: float) -> dict[str, float | int]:
    return {"value": value, "low": low, "high": high, "count": 144, "confidence": 0.9}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def metrics(iteration: int, verdict: float) -> dict[str, Any]:
    row = {"iteration": iteration, "env/verdict": verdict, "env/episodes": 96, "critic/explained_variance": None}
    return row if iteration < 1 else row | {"actor/approx_kl": 0.01 * iteration, "critic/explained_variance": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished demo with figures made up for the test."""
    directory = tmp_path / "demo"
    write(directory / "demo.json", {"evaluation_seeds": [0], "tiny": False, "sha256.policy": "ab" * 32})
    write(directory / "ppo" / "config.json", {"critic_warmup_iterations": 1, "recipe": "mini <b>"})
    rows = [metrics(iteration, 0.25 * iteration) for iteration in range(3)]
    (directory / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write(directory / "evaluate" / "sft" / "result.json", {"success": interval(0.6111, 0.55, 0.67)})
    result = {"success": interval(0.6597, 0.6, 0.72), "success_gain": interval(0.0486, 0.007, 0.09)}
    write(directory / "evaluate" / "ppo" / "result.json", result)
    names = ("reward", "simulator", "world_model")
    servers = [
        {"name": n, "interface_fingerprint": f"interface-{n}", "provenance_fingerprint": f"provenance-{n}"}
        for n in names
    ]
    write(directory / "servers.json", servers)
    phases = {
        "start servers": {"wall_s": 10.0, "trainer": 1.0, "world_model": 4.0},
        "PPO in the world model": {"wall_s": 300.0, "trainer": 200.0, "world_model": 250.0},
    }
    write(directory / "phases.json", phases)
    video = SideBySide("00.mp4", "adjust_bottle/test/0003", 0, True, True, 0.999, False, 0.125)
    write(directory / "videos" / "videos.json", [vars(video)])
    write_mp4(directory / "videos" / "00.mp4", np.zeros((5, 16, 32, 3), np.uint8))
    return directory


class _Page(HTMLParser):
    """Visible text, tags, and every address the page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(run: Path) -> _Page:
    return _Page(report.write_report(run).read_text(encoding="utf-8"))


def test_success_and_paired_gain_are_shown_with_their_intervals(run: Path) -> None:
    text = page_of(run).text
    for part in ("61.1%", "[55.0%, 67.0%]", "66.0%", "[60.0%, 72.0%]", "+4.9 points", "[+0.7, +9.0]", "144"):
        assert part in text


def test_the_page_is_self_contained(run: Path) -> None:
    page = page_of(run)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.addresses
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "url(http" not in report.render(report.load_run(run))


def test_curves_are_inline_svg_and_skip_columns_that_no_row_has(run: Path) -> None:
    page = page_of(run)
    assert page.tags.count("svg") == 3  # success, explained variance, KL; no clip fraction in these metrics
    assert "3 iterations, 288 episodes" in page.text


def test_the_video_is_embedded_whole(run: Path) -> None:
    [address] = [a for a in page_of(run).addresses if a.startswith("data:video/mp4")]
    assert base64.b64decode(address.partition(",")[2]) == (run / "videos" / "00.mp4").read_bytes()


def test_the_caption_says_what_each_side_made_of_the_episode(run: Path) -> None:
    expected = (
        "adjust_bottle/test/0003: success in the simulator; reward model in the simulator: success (peak 0.999); "
        "reward model in the world model: failure (peak 0.125)"
    )
    assert expected in page_of(run).text


def test_fingerprints_of_all_servers_are_shown(run: Path) -> None:
    text = page_of(run).text
    for name in ("reward", "simulator", "world_model"):
        assert f"interface-{name}" in text
        assert f"provenance-{name}" in text


def test_costs_add_up(run: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", report.render(report.load_run(run)))
    assert re.search(r"all\s+201\s+254\s+455\s+310", text)
    assert text.index("start servers") < text.index("PPO in the world model  ")


def test_settings_are_escaped(run: Path) -> None:
    page = report.render(report.load_run(run))
    assert "mini &lt;b&gt;" in page
    assert "mini <b>" not in page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.1, "got better"), (-0.1, -0.01, "got worse"), (-0.02, 0.1, "includes 0"), (0.0, 0.1, "includes 0")],
)
def test_the_gain_is_judged_by_its_interval(low: float, high: float, expected: str) -> None:
    assert expected in report.judge_gain(interval(0.0, low, high))


def test_an_interrupted_demo_has_a_page_without_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "demo.json", {"evaluation_seeds": [0]})
    page = page_of(tmp_path)
    assert "No evaluation yet" in page.text
    assert "svg" not in page.tags


def test_a_run_of_ppo_alone_has_its_curves(run: Path) -> None:
    page = page_of(run / "ppo")
    assert page.tags.count("svg") == 3
    assert "Run ppo" in page.text
    assert "Success in the simulator" not in page.text


def test_the_same_run_gives_the_same_bytes(run: Path) -> None:
    assert report.render(report.load_run(run)) == report.render(report.load_run(run))


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 1
    assert "holds neither demo.json nor metrics.jsonl" in capsys.readouterr().err
