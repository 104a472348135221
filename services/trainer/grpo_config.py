"""Settings of GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.trainer.policy_gradient_config import PolicyGradientConfig


@dataclass(frozen=True)
class GRPOConfig(PolicyGradientConfig):
    """GRPO on a flow policy in a target: a simulator or a world model. No critic, and no KL penalty."""

    recipe: str | None = None
    """A YAML file of settings, or the name of one in recipes/ (grpo-mini). Flags win over it."""
    out: Path = Path("runs/grpo")
    """Directory of this run."""
    clip_high: float = 0.28
    """See clip_low; larger than it is "clip higher" (DAPO, arXiv 2503.14476)."""
    target_kl: float | None = None
    """An update's remaining minibatches are skipped once approx_kl exceeds 1.5 times this (none: never)."""

    # Groups
    groups_per_iteration: int = 8
    """Groups of an update's batch."""
    group_size: int = 8
    """Episodes of a group: same start, other noise."""
    dynamic_sampling: bool = True
    """Replace groups whose episodes all ended alike, which teach nothing, by new ones until the batch is full."""
    max_sampling_rounds: int = 8
    """Bound of dynamic sampling: how often what is missing is drawn. A batch that is not full then is used as it is,
    with a warning; one that is empty skips the update."""
    advantage: Literal["standardised", "leave_one_out"] = "standardised"
    """An episode's return minus the mean of its group, over the group's deviation (GRPO), or minus the mean of the
    others (RLOO)."""
    mask_after_success: bool = True
    """Decisions after the one that brought the first success carry no loss (WoVR)."""

    # Keyframe starts
    keyframes: Path | None = None
    """Directory of recorded episodes: some groups start at a later frame of a success, reached by replaying the actions
    that it executed before."""
    keyframe_share: float = 0.5
    """Share of groups that start at a keyframe, with `keyframes`."""
    keyframe_decisions: tuple[int, ...] = (1,)
    """At which of a recording's decisions (chunks, from 0) such a start may lie; one after its success never does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("groups_per_iteration", 1), ("group_size", 2), ("max_sampling_rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}; got {getattr(self, name)}")
        if not 0.0 <= self.keyframe_share <= 1.0:
            raise ValueError(f"keyframe_share: expected a number in [0, 1]; got {self.keyframe_share}")
        if not self.keyframe_decisions or min(self.keyframe_decisions) < 1:
            raise ValueError(
                f"keyframe_decisions: expected decisions from 1 on (0 is the episode's start); got "
                f"{self.keyframe_decisions}"
            )
