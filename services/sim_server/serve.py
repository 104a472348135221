"""The simulator as a server: `worldserve serve-sim`.

    worldserve serve-sim --bind 127.0.0.1:50051
    worldserve serve-sim --bind 127.0.0.1:50051 --reward 127.0.0.1:50053     # verdicts beside the ground truth

It prints one line of JSON when it is ready. SIGTERM and Ctrl-C drain it: running calls end, new ones are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worldserve.serving import ServerSettings, run_environment_server

SUMMARY = "Serve the tabletop simulator."


@dataclass(frozen=True)
class SimServerSettings(ServerSettings):
    """The tabletop simulator as a server."""

    workers: int = 2
    """Simulator processes, about one a core; each holds 64 episodes."""
    initial_states: Path = Path("initial_states")
    """Directory of the sealed sets."""
    camera: Literal["default", "robotwin"] = "default"
    """"default" sees every success; "robotwin" is RoboTwin's own head camera, which does not."""
    reward: str = ""
    """HOST:PORT of a reward server. Without one the reward is the simulator's ground truth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1:
            raise ValueError(f"workers: expected at least 1; got {self.workers}")


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve serve-sim`."""
    import tyro

    from services.sim_server.backend import TabletopBackend

    settings = tyro.cli(SimServerSettings, args=argv, prog="worldserve serve-sim", description=__doc__)

    def build(reward_fingerprint: str) -> TabletopBackend:
        return TabletopBackend(settings.workers, settings.initial_states, settings.camera, reward_fingerprint)

    return run_environment_server("serve-sim", build, settings.reward, settings)


if __name__ == "__main__":
    sys.exit(main())
