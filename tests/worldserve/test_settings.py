"""Work goes on under the settings it was begun with, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from worldserve.settings import flat_settings, json_safe, refuse_changed_settings


def refuse(before: dict[str, Any], now: dict[str, Any], **more: Any) -> None:
    refuse_changed_settings(before, now, what="out: runs/a holds a run", advice="Choose another --out.", **more)


def test_every_setting_that_differs_is_listed_by_its_dotted_name() -> None:
    with pytest.raises(ValueError) as caught:
        refuse({"seed": 0, "model": {"width": 8, "name": "a"}}, {"seed": 1, "model": {"width": 9, "name": "a"}})
    assert str(caught.value) == (
        "out: runs/a holds a run:\n  model.width: expected 8; got 9\n  seed: expected 0; got 1\nChoose another --out."
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"states": [1, 2]}, {"states": (1, 2)}),
        ({"out": "runs/a"}, {"out": Path("runs/a")}),
        ({"rate": None}, {"rate": float("nan")}),
        ({"seed": 0}, {"seed": 0, "added_since": None}),
        ({"seed": 0, "model": {"removed_since": None}}, {"seed": 0}),
        ({}, {}),
    ],
)
def test_the_same_settings_pass(before: dict[str, Any], now: dict[str, Any]) -> None:
    refuse(before, now)
    refuse(now, before)
    with pytest.raises(ValueError) as caught:  # and beside a setting that differs, they are not named either
        refuse({**before, "other": 1}, {**now, "other": 2})
    assert str(caught.value).splitlines()[1:-1] == ["  other: expected 1; got 2"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"seed": 1}, "seed: expected nothing (not recorded); got 1"),
        ({"seed": 1}, {}, "seed: expected 1; got nothing (not recorded)"),
        ({"model": None}, {"model": {"width": 8}}, "model.width: expected nothing (not recorded); got 8"),
        ({"rate": 1.0}, {"rate": float("nan")}, "rate: expected 1.0; got None"),
        ({"name": "1"}, {"name": 1}, "name: expected '1'; got 1"),
    ],
)
def test_what_one_side_lacks_or_has_as_another_type_is_refused(
    before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        refuse(before, now)
    assert said in str(caught.value)


def test_free_settings_may_change_with_all_that_is_nested_in_them() -> None:
    before, now = {"threads": 1, "model": {"width": 8}}, {"threads": 2, "model": {"width": 9}}
    refuse(before, now, free={"threads", "model"})
    refuse(before, now, free={"threads", "model.width"})
    with pytest.raises(ValueError, match=r"model\.width"):
        refuse(before, now, free={"threads", "mod", "model.wid"})


def test_a_setting_added_since_means_what_was_done_before_it() -> None:
    defaults = {"scale": "percentiles", "model.maps": 0}
    before, same = {"seed": 0}, {"seed": 0, "scale": "percentiles", "model": {"maps": 0}}
    refuse(before, same, defaults=defaults)
    refuse(same, before, defaults=defaults)
    with pytest.raises(ValueError, match=r"model\.maps: expected nothing \(not recorded\); got 0"):
        refuse(before, same)
    with pytest.raises(ValueError) as caught:
        refuse(before, {"seed": 0, "scale": "workspace", "model": {"maps": 8}}, defaults=defaults)
    assert str(caught.value).splitlines()[1:3] == [
        "  model.maps: expected 0 (not recorded); got 8",
        "  scale: expected 'percentiles' (not recorded); got 'workspace'",
    ]


def test_flat_settings_are_their_own_flat_form() -> None:
    flat = flat_settings({"a": {"b": {"c": 1}, "d": (Path("x"),)}, "e": None})
    assert flat == {"a.b.c": 1, "a.d": ["x"], "e": None}
    assert flat_settings(flat) == flat


@dataclasses.dataclass
class Inner:
    sizes: tuple[int, ...] = (1, 2)
    path: Path = Path("a/b")
    limit: float = float("inf")


def test_json_gives_safe_values_back_as_they_are() -> None:
    safe = json_safe({"inner": dataclasses.asdict(Inner()), 3: [float("nan"), True, None, "s"]})
    assert safe == {"inner": {"sizes": [1, 2], "path": "a/b", "limit": None}, "3": [None, True, None, "s"]}
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
