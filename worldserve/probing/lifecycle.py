"""Probes of an episode's life: how it starts, when it ends, what its end is called, where the reward stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from worldserve.probing.finding import Finding, found, not_applicable
from worldserve.probing.pictures import CLEARLY, SAME
from worldserve.probing.run import Frame, Run, Trace


def _same_state(run: Run) -> list[Trace]:
    return [trace for trace in run.traces.values() if trace.item.initial_state_id == run.question.state]


def _gap(first: Frame, second: Frame) -> float:
    return float(np.abs(first.astype(np.int16) - second.astype(np.int16)).mean())


def _difference(first: Trace, second: Trace) -> float:
    return _gap(first.opened.frame, second.opened.frame)


def _end(trace: Trace) -> tuple[tuple[str, Frame], ...]:
    """Its last picture."""
    return ((f"end of {trace.name!r}", trace.frames[max(trace.frames)]),) if trace.frames else ()


def reset_state(run: Run) -> Finding:
    """Does Reset report the new scene's state?"""
    first, *later = _same_state(run)
    gaps = {t.name: float(np.abs(t.opened.proprioception - first.opened.proprioception).max()) for t in later}
    worst = max(gaps, key=lambda name: gaps[name])
    fault = gaps[worst] > 0
    return Finding(
        "reset_state", reset_state.__doc__ or "", found(fault),
        f"{len(gaps) + 1} Resets of one initial state report states up to {gaps[worst]:.3g} apart",
        f"Reset reports the last command of the episode before (first seen in {worst!r}), not the initial state."
        if fault else "",
        {"largest_gap": gaps[worst], "resets": len(gaps) + 1},
        (("first reset", first.opened.frame), (f"reset of {worst!r}", run.traces[worst].opened.frame)),
    )  # fmt: skip


def reset_image(run: Run) -> Finding:
    """Does Reset show the new scene?"""
    first, *later = _same_state(run)
    gaps = {trace.name: _difference(first, trace) for trace in later}
    worst = max(later, key=lambda trace: gaps[trace.name])
    fault = gaps[worst.name] > 0
    strip = [("first reset", first.opened.frame), (f"reset of {worst.name!r}", worst.opened.frame)]
    ends = {t.name: t.frames[max(t.frames)] for t in run.traces.values() if t.frames and t is not worst}
    nearest = min(ends, key=lambda name: _gap(worst.opened.frame, ends[name]), default=None)
    echo = nearest is not None and _gap(worst.opened.frame, ends[nearest]) < CLEARLY * gaps[worst.name]
    if nearest is not None and echo:
        strip.append((f"end of {nearest!r}", ends[nearest]))
    cause = (
        f"Reset returns the last frame of an episode before ({nearest!r}, seen in {worst.name!r}), not frame 0."
        if echo
        else f"Frame 0 is not a function of the initial state (seen in {worst.name!r}): another scene, or a renderer "
        "that is not reproducible."
    )
    return Finding(
        "reset_image", reset_image.__doc__ or "", found(fault),
        f"{len(gaps) + 1} Resets of one initial state show frames up to {gaps[worst.name]:.2f} levels apart",
        cause if fault else "",
        {"largest_gap_levels": gaps[worst.name], "resets": len(gaps) + 1}, tuple(strip),
    )  # fmt: skip


def second_reset(run: Run) -> Finding:
    """Does a later Reset make the scene that it names?"""
    first, other = run.traces["hold"], run.traces["other state"]
    gap = _difference(first, other)
    known = run.question.known_frames.get(run.question.other_state)
    start = run.question.known_frames.get(run.question.state, first.opened.frame)
    unlike = None
    # A picture that is turned or cropped is unlike any known frame: image_geometry says so.
    as_known = start.shape == first.opened.frame.shape and _gap(first.opened.frame, start) <= SAME
    if as_known and known is not None and known.shape == other.opened.frame.shape:
        own, stale = (_gap(other.opened.frame, frame) for frame in (known, start))
        unlike = own > SAME and stale < CLEARLY * own
    fault = gap == 0 or bool(unlike)
    renamed = [t.name for t in run.traces.values() if t.opened.initial_state_id != t.item.initial_state_id]
    return Finding(
        "second_reset", second_reset.__doc__ or "", found(fault or bool(renamed)),
        f"the frames of {run.question.state} and, later, {run.question.other_state} differ by {gap:.2f} levels",
        "A later Reset leaves the scene of an earlier one." if fault else
        f"The reply names another initial state than was asked for ({renamed[0]})." if renamed else "",
        {"frames_differ_levels": gap},
        ((run.question.state, first.opened.frame), (run.question.other_state, other.opened.frame)),
    )  # fmt: skip


def early_end(run: Run) -> Finding:
    """Does an episode go on after its success, to the limit?"""
    question = early_end.__doc__ or ""
    if run.script.interface.termination.success_ends_episode:
        return not_applicable("early_end", question, "this contract lets success end an episode")
    whole = [t for t in run.traces.values() if len(t.actions) == run.script.limit and t.replies]
    early = {t.name: t.elapsed for t in whole if t.elapsed != run.script.limit or not t.ended}
    success = run.traces.get("success")
    seen = success is not None and any(bool(reply.success) for reply in success.replies)
    unknown = success is not None and all(reply.success is None for reply in success.replies)
    if not early and not seen and not unknown:
        why = "no episode succeeded" if success else "no reference with an episode that succeeds (--reference)"
        return not_applicable("early_end", question, f"{why}, so that none could end early; none did")
    numbers: dict[str, float | int | str | bool | None] = {f"end_of_{name}": elapsed for name, elapsed in early.items()}
    return Finding(
        "early_end", question, found(bool(early)),
        f"{len(early)} of {len(whole)} whole episodes did not end at action {run.script.limit}"
        + (f": {', '.join(f'{name!r} at {at}' for name, at in early.items())}" if early else ""),
        (
            "Episodes end at their first success: the object never gets the chance to fall, and failures look like "
            "successes."
            if min(early.values()) < run.script.limit else
            "The limit is no end: no flag is set at it, and callers wait for an end that does not come."
        ) if early else "",
        numbers,
        tuple((f"after action {at}", f) for at, f in success.frames.items() if at % 25 == 0) if success else (),
    )  # fmt: skip


def limit_flags(run: Run) -> Finding:
    """Is the limit called what the contract calls it?"""
    hold, rule = run.traces["hold"].last, run.script.interface.termination
    assert hold is not None
    if hold.elapsed_steps != rule.limit_actions:
        return not_applicable("limit_flags", limit_flags.__doc__ or "", "no episode reached the limit; see early_end")
    terminated = rule.limit_is == "terminated"
    fault = (hold.terminated, hold.truncated, hold.end_reason) != (terminated, not terminated, "limit")
    return Finding(
        "limit_flags", limit_flags.__doc__ or "", found(fault),
        f"at action {rule.limit_actions}: terminated {hold.terminated}, truncated {hold.truncated}, end_reason "
        f"{hold.end_reason!r}; the contract's limit is {rule.limit_is!r}",
        "The flags at the limit are not the contract's (exchanged or unset): values would be bootstrapped past an end, "
        "or cut where they go on." if fault else "",
        {"terminated": hold.terminated, "truncated": hold.truncated, "end_reason": hold.end_reason},
        _end(run.traces["hold"]),
    )  # fmt: skip


def success_apart(run: Run) -> Finding:
    """Is success told apart from the end?"""
    hold = run.traces["hold"].last
    assert hold is not None
    world_model = run.contract.provenance.kind == "world_model"
    ends = [reply for trace in run.traces.values() for reply in trace.replies]
    told = [reply.success for reply in ends if reply.success is not None]
    fault = bool(hold.success) or (world_model and bool(told))
    what = "unset in each of them" if not told else f"set in {len(told)} of them"
    return Finding(
        "success_apart", success_apart.__doc__ or "", found(fault),
        f"an episode that did nothing ended with success {hold.success}; over {len(ends)} chunks success is {what}",
        ("A world model has no ground truth: success must be unset. " if world_model else "")
        + "Whoever reaches the end is called a success: the flags are merged." if fault else "",
        {"success_of_nothing": hold.success, "terminated": hold.terminated},
        _end(run.traces["hold"]),
    )  # fmt: skip


def reward_place(run: Run) -> Finding:
    """Does the reward stand at the last action, and nowhere else?"""
    question = reward_place.__doc__ or ""
    misplaced, missing, placed = [], [], 0
    for trace in run.traces.values():
        for reply in trace.replies:
            ended = reply.terminated or reply.truncated
            astray = reply.rewards[:-1] if ended else reply.rewards
            if astray.any():
                at = reply.elapsed_steps - len(reply.rewards) + int(np.flatnonzero(astray)[0]) + 1
                misplaced.append(f"{trace.name!r} at action {at}")
            if ended:
                success = reply.verdict.success if reply.verdict is not None else reply.success
                placed += int(reply.rewards[-1] != 0)
                if success is not None and float(reply.rewards[-1]) != float(success):
                    missing.append(f"{trace.name!r}: {float(reply.rewards[-1]):g} for success {success}")
    if not (misplaced or missing or placed):
        return not_applicable("reward_place", question, "no episode was rewarded (no success, or no reward server)")
    fault = bool(misplaced or missing)
    return Finding(
        "reward_place", question, found(fault),
        f"{placed} rewards stand at an episode's last action; elsewhere: {', '.join(misplaced) or 'none'}; "
        f"not as judged: {', '.join(missing) or 'none'}",
        "The reward is placed at another action than the last: returns and advantages are wrong." if fault else "",
        {"at_last_action": placed, "elsewhere": len(misplaced), "not_as_judged": len(missing)},
        _end(run.traces["success"]) if "success" in run.traces else (),
    )  # fmt: skip


# A scene that stays shows a wrong frame, too: second_reset comes first.
PROBES: tuple[Callable[[Run], Finding], ...] = (
    reset_state, second_reset, reset_image, early_end, limit_flags, success_apart, reward_place,
)  # fmt: skip


def inspect(run: Run) -> list[Finding]:
    """All probes of episodes' lives."""
    return [probe(run) for probe in PROBES]
