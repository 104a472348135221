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
    sampler_steps: int = 0
    """Steps a chunk is drawn in, at noise levels 5u / (1 + 4u), u = 1, (N-1)/N, ..., 1/N; 0 takes the levels that the
    model was saved with. The contract's provenance names the levels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 1:
            raise ValueError(f"threads: expected at least 1; got {self.threads}")
        if self.sampler_steps < 0:
            raise ValueError(f"sampler_steps: expected at least 1, or 0 for the model's own; got {self.sampler_steps}")


def main(argv: Sequence[str] | None = None) -> int:
    """`worldserve serve-wm`."""
    import tyro

    from services.wm_server.backend import WorldModelBackend, build_backend

    settings = tyro.cli(WorldModelServerSettings, args=argv, prog="worldserve serve-wm", description=__doc__)

    def build(reward_fingerprint: str) -> WorldModelBackend:
        paths = (settings.weights, settings.initial_states)
        return build_backend(*paths, settings.threads, reward_fingerprint, settings.sampler_steps)

    return run_environment_server("serve-wm", build, settings.reward, settings)


if __name__ == "__main__":
    sys.exit(main())
