"""The figures of a world model on held-out episodes: those of a finished run, and of the card of shipped weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from services.wm_server.episodes import EpisodeSubset
from services.wm_server.measure import FinalFrameScorer, last_frames, moving_error, outcome_accuracy
from services.wm_server.model import WorldModel
from services.wm_server.outcomes import balanced_episodes, has_both_outcomes


def figures(model: WorldModel, training: EpisodeSubset, validation: EpisodeSubset, count: int) -> dict[str, Any]:
    """Decibels over moving pixels ("moving"); where there are both outcomes, those by the last frame ("outcome").

    Args:
        model: the world model.
        training: the episodes that the scorer of last frames is fitted on.
        validation: held-out episodes.
        count: how many of them are drawn, failures and successes alike; a third of them for moving pixels.
    """
    episodes = balanced_episodes(validation, count)
    shown = episodes if len(episodes) else validation
    moving = moving_error(model, shown[: max(1, count // 3)])
    result: dict[str, Any] = {"moving": {**asdict(moving), "gap_db": moving.gap_db}}
    if has_both_outcomes(episodes) and has_both_outcomes(training):
        scorer = FinalFrameScorer(*last_frames(training))
        frames, success = last_frames(episodes)
        accuracy, _ = outcome_accuracy(model, episodes, scorer)
        derived = {name: getattr(accuracy, name) for name in ("fake_success", "recall", "balanced")}
        derived["scorer_accuracy"] = float(((scorer.score(frames) > 0.0) == success).mean())
        result["outcome"] = {**asdict(accuracy), **derived}
    return result
