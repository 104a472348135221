"""Settings of DPO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DPOConfig:
    """DPO of a flow policy on recorded episodes: no simulator and no world model runs."""

    recipe: str | None = None
    """A YAML file of settings. Flags win over it."""
    data: tuple[Path, ...] = ()
    """Directories of recorded episodes (`worldserve collect`), with several episodes from each initial state."""
    store: str = ""
    """Replay store to read as well, or instead: a directory or redis://HOST:PORT/DATABASE ("": none)."""
    policy: Path = Path("weights/policy-sft")
    """Directory of the policy to start from, which is the reference, too."""
    out: Path = Path("runs/dpo")
    """Directory of this run."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`."""
    seed: int = 0
    """All randomness of the run follows from it."""
    threads: int = 1
    """CPU threads of torch."""

    # Pairs
    outcome: Literal["success", "verdict"] = "success"
    """What makes an episode the chosen one: the simulator's ground truth, or the reward model's verdict."""
    pairs_per_state: int = 8
    """Most pairs of one initial state; a state needs a success and a failure to have one."""
    validation_share: float = 0.1
    """Share of the states whose pairs are not trained on, for the validation figures."""
    decisions: tuple[int, ...] = ()
    """Decisions of an episode (from 0) that are compared (none given: all)."""

    # Loss
    beta: float = 2000.0
    """How strongly the policy is held to the reference: beta of Diffusion-DPO, on squared errors averaged over the
    numbers of a chunk."""
    unit: Literal["decision", "episode"] = "episode"
    """What one comparison is about: a decision, or an episode, whose decisions' errors are added."""
    sft_weight: float = 0.0
    """Weight of the chosen episodes' flow-matching loss beside DPO's, which alone may make both sides less likely."""
    draws: int = 2
    """Noises and flow times a decision and step."""

    # Optimisation
    epochs: int = 4
    """Passes over the pairs."""
    batch_size: int = 16
    """Pairs an optimiser step."""
    microbatch_size: int = 4
    """Pairs a forward pass; gradients add up to the batch's."""
    learning_rate: float = 1e-5
    """Of Adam."""
    max_grad_norm: float = 1.0
    """Gradient clipping."""
    trainable: Literal["all", "expert"] = "expert"
    """"expert": the prefix (vision and language) stays as it is."""

    def __post_init__(self) -> None:
        counts = ("pairs_per_state", "draws", "epochs", "batch_size", "microbatch_size", "threads")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        for name in ("beta", "learning_rate", "max_grad_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}: expected a positive number; got {getattr(self, name)}")
        if not (math.isfinite(self.sft_weight) and self.sft_weight >= 0):
            raise ValueError(f"sft_weight: expected 0 or a positive number; got {self.sft_weight}")
        if not 0.0 <= self.validation_share < 1.0:
            raise ValueError(f"validation_share: expected a number in [0, 1); got {self.validation_share}")
        if any(decision < 0 for decision in self.decisions) or len(set(self.decisions)) != len(self.decisions):
            raise ValueError(f"decisions: expected some from 0 on, each once; got {self.decisions}")
