"""What PPO writes down, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.ppo_metrics import approximate_kl, merge


def test_approximate_kl_is_zero_only_for_equal_densities() -> None:
    assert float(approximate_kl(torch.zeros(5, 1))) == 0.0
    assert float(approximate_kl(torch.tensor([[0.1], [-0.1]]))) == pytest.approx(0.005, rel=0.01)


def test_merged_metrics_keep_what_is_no_number() -> None:
    nan = float("nan")
    assert np.isnan(merge([(0.5, {"a_max": 1.0}), (0.5, {"a_max": nan})])["a_max"])
    assert np.isnan(merge([(0.5, {"a_max": nan}), (0.5, {"a_max": 1.0})])["a_max"])
    assert merge([(0.25, {"a": 1.0, "a_max": 1.0}), (0.75, {"a": 3.0, "a_max": 3.0})]) == {"a": 2.5, "a_max": 3.0}
