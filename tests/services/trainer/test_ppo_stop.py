"""When the rest of an iteration's policy steps is left out."""

from __future__ import annotations

import pytest

from services.trainer.ppo_config import PPOConfig
from services.trainer.ppo_stop import stop_reason


@pytest.mark.parametrize(
    ("ratio", "kl", "target_kl", "expected"),
    [
        (1.5, 0.01, 0.05, None),
        (20.0, 0.075, 0.05, None),  # both at their limits
        (20.1, 0.01, 0.05, "max_ratio"),
        (1.5, 0.076, 0.05, "target_kl"),
        (1.5, 9.0, None, None),  # no target: no stop
        (20.1, 9.0, 0.05, "max_ratio"),  # the alarm comes first
        (float("inf"), 0.01, None, "max_ratio"),
        (float("nan"), 0.01, None, "max_ratio"),
    ],
)
def test_the_reason(ratio: float, kl: float, target_kl: float | None, expected: str | None) -> None:
    config = PPOConfig(target_kl=target_kl, max_ratio=20.0)
    stop = stop_reason({"actor/ratio_max": ratio, "actor/approx_kl": kl}, config)
    assert (stop.name if stop else None) == expected
    if stop is not None:
        assert "lower learning_rate" in stop.message
