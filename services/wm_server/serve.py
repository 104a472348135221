"""The world model as a server: `worldserve serve-wm`.

    worldserve serve-wm --bind 127.0.0.1:50052 --weights weights/bwm-mini --reward 127.0.0.1:50053

It prints one line of JSON when it is ready. SIGTERM and Ctrl-C drain it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worldserve.serving import RemoteJudge, ServerSettings, serve, start_environment_server

SUMMARY = "Serve the world model."


@dataclass(frozen=True)
class WorldModelServerSettings(ServerSettings):
    """The world model as a server."""

    weights: Path = Path("weights/bwm-mini")
    """Directory of the world model."""
    initial_states: Path = Path("initial_states")
    """Directory of the sealed sets, whose first frames episodes start from."""
    reward: str = ""
    """HOST:PORT of the reward server. Without one no episode is ever judged, and training refuses the target."""
    threads: int = 1
    """CPU threads of torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve serve-wm`."""
    import tyro

    from services.wm_server.backend import build_backend
    from worldserve.contract import fingerprint

    settings = tyro.cli(WorldModelServerSettings, args=argv, prog="worldserve serve-wm", description=__doc__)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        judge = RemoteJudge(settings.reward) if settings.reward else None
        reward = fingerprint(judge.contract().provenance) if judge else ""
        backend = build_backend(settings.weights, settings.initial_states, settings.threads, reward)
        server = start_environment_server(backend, judge, settings)
    except (OSError, ValueError) as error:
        print(f"worldserve serve-wm: {error}", file=sys.stderr)
        return 1
    return serve(server, backend.shutdown)


if __name__ == "__main__":
    sys.exit(main())
