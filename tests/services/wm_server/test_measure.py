import numpy as np
import pytest
import torch

from services.wm_server.measure import FinalFrameScorer, OutcomeAccuracy, moving_error, outcome_accuracy
from tests.services.wm_server.conftest import make_episode, make_model


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    frames = random.integers(90, 110, (count, 32, 64, 3)).astype(np.uint8)
    success = random.random(count) < 0.5
    for frame, up in zip(frames, success):
        row = 4 if up else 22
        frame[row : row + 6, 20:30] = (200, 20, 20)
    return frames, success


def test_scorer_reads_where_the_coloured_thing_is():
    scorer = FinalFrameScorer(*pictures(40, 0))
    frames, success = pictures(20, 1)
    assert ((scorer.score(frames) > 0) == success).all()
    with pytest.raises(ValueError, match="one kind"):
        FinalFrameScorer(frames, np.ones(20, bool))


def test_accuracy_figures():
    accuracy = OutcomeAccuracy(failures=10, failures_right=8, successes=20, successes_right=19)
    assert accuracy.fake_success == pytest.approx(0.2)
    assert accuracy.recall == pytest.approx(0.95)
    assert accuracy.balanced == pytest.approx(0.875)


def test_moving_error_counts_only_what_moves(model):
    episodes = [make_episode(0), make_episode(1)]
    result = moving_error(model, episodes, starts=(50,))
    assert result.windows == 2
    # A moving square on a still ground: copying the last frame is wrong exactly where something moves.
    assert result.last_frame_db < result.whole_frame_db
    assert np.isfinite([result.right_db, result.shuffled_db, result.gap_db]).all()


def test_a_model_that_draws_numbers_that_are_not_finite_is_not_measured():
    broken = make_model()
    broken.transformer.wan.proj_out.bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="finite latents after frame 50"):
        moving_error(broken, [make_episode(0)], starts=(50,))


def test_outcomes_are_counted_by_kind(model):
    episodes = [make_episode(0, success=True), make_episode(1, success=False)]
    scorer = FinalFrameScorer(*pictures(20, 0))
    accuracy, scores = outcome_accuracy(model, episodes, scorer)
    assert (accuracy.failures, accuracy.successes, len(scores)) == (1, 1, 2)
