"""The world model as a server: `worldserve serve-wm`.

    worldserve serve-wm --bind 127.0.0.1:50052 --weights weights/bwm-mini --reward 127.0.0.1:50053

It prints one line of JSON when it is ready. SIGTERM and Ctrl-C drain it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worldserve.serving import ServerSettings, run_environment_server

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 1:
            raise ValueError(f"threads: expected at least 1; got {self.threads}")


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve serve-wm`."""
    import tyro

    from services.wm_server.backend import WorldModelBackend, build_backend

    settings = tyro.cli(WorldModelServerSettings, args=argv, prog="worldserve serve-wm", description=__doc__)

    def build(reward_fingerprint: str) -> WorldModelBackend:
        return build_backend(settings.weights, settings.initial_states, settings.threads, reward_fingerprint)

    return run_environment_server("serve-wm", build, settings.reward, settings)


if __name__ == "__main__":
    sys.exit(main())
