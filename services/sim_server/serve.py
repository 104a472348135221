"""The simulator as a server: `worldserve serve-sim`.

    worldserve serve-sim --bind 127.0.0.1:50051
    worldserve serve-sim --bind 127.0.0.1:50051 --reward 127.0.0.1:50053     # verdicts beside the ground truth

It prints one line of JSON when it is ready. SIGTERM and Ctrl-C drain it: running calls end, new ones are refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worldserve.serving import RemoteJudge, ServerSettings, serve, start_environment_server

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


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve serve-sim`."""
    import tyro

    from services.sim_server.backend import TabletopBackend
    from worldserve.contract import fingerprint

    settings = tyro.cli(SimServerSettings, args=argv, prog="worldserve serve-sim", description=__doc__)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        judge = RemoteJudge(settings.reward) if settings.reward else None
        reward = fingerprint(judge.contract().provenance) if judge else ""
        backend = TabletopBackend(settings.workers, settings.initial_states, settings.camera, reward)
        server = start_environment_server(backend, judge, settings)
    except (OSError, ValueError) as error:
        print(f"worldserve serve-sim: {error}", file=sys.stderr)
        return 1
    return serve(server, backend.shutdown)


if __name__ == "__main__":
    sys.exit(main())
