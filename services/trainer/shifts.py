"""The floor under forks: how often the simulator's own outcome flips when the start moves by half a pixel.

A world model sees the start through a camera. Where half a pixel decides between success and failure, no model of those
frames can know the outcome, so its fake success is read above the share of failures that the shift turns to successes.

Half a pixel at the bottle, about (0.1, -0.1, 0.75) m, through the default camera (eye (0, -0.8, 1.42), target
(0, -0.1, 0.935), vertical field of view 36 degrees, 96 rows): the focal length is 48 / tan(18 deg) = 147.7 px. Forward
is (0, 0.822, -0.570) and up (0, 0.570, 0.822), so the bottle lies 0.957 m along the axis and 0.152 m below it. In x,
which is across the line of sight, a metre is 147.7 / 0.957 = 154.4 px: half a pixel is 3.24 mm. In y, foreshortened, it
is 147.7 (0.570 / 0.957 + 0.152 * 0.822 / 0.957^2) = 108.1 px: 4.63 mm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from services.trainer.action_runs import ActionRun, run_actions
from services.trainer.fork_statistics import rate, summed
from services.trainer.rollout import Client
from worldserve.episodes import Episode
from worldserve.episodes.initial_states import shifted_id

Row = Mapping[str, Any]
HALF_PIXEL_MM = {"x": 3.24, "y": 4.63}
"""Through the default camera, at the bottle."""


def half_pixel_shifts(x_mm: float, y_mm: float) -> dict[str, tuple[int, int]]:
    """The four shifts by name, in micrometres: "+x", "-x", "+y", "-y"."""
    x_um, y_um = round(x_mm * 1000), round(y_mm * 1000)
    return {"+x": (x_um, 0), "-x": (-x_um, 0), "+y": (0, y_um), "-y": (0, -y_um)}


def measure_floor(
    client: Client,
    episodes: Iterable[Episode],
    shifts: Mapping[str, tuple[int, int]],
    chunk_actions: int,
    batch: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Replays recorded actions in the simulator from the start itself and from each shifted one; `keep` gets rows.

    A row: {"episode_id", "initial_state_id", "recorded": bool, "unmoved": bool, "shifted": {name: bool}}. What flips is
    measured against "unmoved", the same simulator's own replay: another machine's may differ from the record.
    """
    waiting: list[Episode] = []
    per_call = max(1, batch // (1 + len(shifts)))

    def run() -> None:
        runs = [
            ActionRun(name, episode.seed, episode.executed_actions)
            for episode in waiting
            for name in (
                episode.initial_state_id,
                *(shifted_id(episode.initial_state_id, *shift) for shift in shifts.values()),
            )
        ]
        outcomes = [bool(outcome.success) for outcome in run_actions(client, runs, chunk_actions)]
        size = 1 + len(shifts)
        keep(
            [
                {
                    "episode_id": episode.episode_id,
                    "initial_state_id": episode.initial_state_id,
                    "recorded": bool(episode.success),
                    "unmoved": outcomes[size * number],
                    "shifted": dict(zip(shifts, outcomes[size * number + 1 : size * (number + 1)], strict=True)),
                }
                for number, episode in enumerate(waiting)
            ]
        )
        waiting.clear()

    for episode in episodes:
        waiting.append(episode)
        if len(waiting) == per_call:
            run()
    if waiting:
        run()


def flips(rows: Sequence[Row], unmoved: bool | None = None) -> dict[str, tuple[float, float]]:
    """By initial state: shifted replays that flipped, and all; of episodes that ended `unmoved` so, or of every one."""
    return summed(
        (row["initial_state_id"], sum(s != row["unmoved"] for s in row["shifted"].values()), len(row["shifted"]))
        for row in rows
        if unmoved is None or row["unmoved"] == unmoved
    )


def summarise_floor(rows: Sequence[Row], mixed: Iterable[str], confidence: float, seed: int) -> dict[str, Any]:
    """Flip rates over all states, over mixed and single ones, and by direction; intervals over initial states."""
    mixed = set(mixed)

    def rates(part: Sequence[Row]) -> dict[str, Any]:
        kinds = {"flip_rate": None, "failure_to_success": False, "success_to_failure": True}
        return {name: rate(flips(part, unmoved), confidence, seed) for name, unmoved in kinds.items()}

    def one_way(name: str) -> list[dict[str, Any]]:
        return [{**row, "shifted": {name: row["shifted"][name]}} for row in rows]

    directions = sorted({name for row in rows for name in row["shifted"]})
    return {
        **rates(rows),
        "episodes": len(rows),
        "states": len({row["initial_state_id"] for row in rows}),
        "not_reproduced": sum(row["recorded"] != row["unmoved"] for row in rows),
        "mixed": rates([row for row in rows if row["initial_state_id"] in mixed]),
        "single": rates([row for row in rows if row["initial_state_id"] not in mixed]),
        "flip_rate_by_direction": {name: rate(flips(one_way(name)), confidence, seed) for name in directions},
    }
