"""Every fault by its name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from worldserve.contract import Interface
from worldserve.faults import actions, episodes, pictures
from worldserve.faults.layer import Calls, Layer

FAULTS: dict[str, type[Layer]] = {
    "arms_swapped": actions.ArmsSwapped,
    "joint_order": actions.JointOrder,
    "gripper_sense": actions.GripperSense,
    "units_degrees": actions.UnitsDegrees,
    "action_space": actions.ActionSpace,
    "normalisation_range": actions.NormalisationRange,
    "delta_actions": actions.DeltaActions,
    "action_offset": actions.ActionOffset,
    "frame_offset": pictures.FrameOffset,
    "reset_echo_state": episodes.ResetEchoState,
    "reset_echo_image": episodes.ResetEchoImage,
    "stale_reset": episodes.StaleReset,
    "early_end": episodes.EarlyEnd,
    "limit_flags": episodes.LimitFlags,
    "success_merged": episodes.SuccessMerged,
    "reward_moved": episodes.RewardMoved,
    "episodes_leak": pictures.EpisodesLeak,
    "batch_changes": actions.BatchChanges,
    "seed_ignored": episodes.SeedIgnored,
    "noise_shared": episodes.NoiseShared,
    "history_ignored": pictures.HistoryIgnored,
    "colours_swapped": pictures.ColoursSwapped,
    "image_flipped": pictures.ImageFlipped,
    "image_upside_down": pictures.ImageUpsideDown,
    "image_scaled": pictures.ImageScaled,
    "plan_holds": actions.PlanHolds,
}


def check_faults(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each known and given once. Raises ValueError with the nearest known name otherwise."""
    for name in names:
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, n=1)
            advice = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"fault: expected one of {', '.join(FAULTS)}; got {name!r}.{advice}")
    if len(set(names)) != len(names):
        raise ValueError(f"fault: expected each name once; got {', '.join(names)}")
    return tuple(names)


def describe(name: str) -> str:
    """One line about a fault."""
    return (FAULTS[name].__doc__ or "").partition("\n")[0]


def layers(inner: Calls, interface: Interface, names: Sequence[str]) -> Calls:
    """`inner` behind the faults; the first one named is nearest to the caller."""
    calls = inner
    for name in reversed(check_faults(names)):
        calls = FAULTS[name](calls, interface)
    return calls
