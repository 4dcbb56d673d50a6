"""Learning rates between the warm-up and the end of a run."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from shoal.algo.schedule import learning_rate


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("min_share", [0.0, 0.25, 1.0])
def test_falling_rates_start_at_the_peak_halve_in_the_middle_and_end_at_the_share(
    schedule: Literal["linear", "cosine"], min_share: float
) -> None:
    rates = [
        learning_rate(index, lr=2.0, warmup_steps=4, total_steps=24, schedule=schedule, min_share=min_share) for index in (4, 14, 24, 100)
    ]
    assert rates == pytest.approx([2.0, 2.0 * (1 + min_share) / 2, 2.0 * min_share, 2.0 * min_share], rel=1e-12, abs=1e-15)


def test_cosine_equals_hand_computed_numbers() -> None:
    rates = [learning_rate(index, lr=1.0, total_steps=4, schedule="cosine", min_share=0.1) for index in range(5)]
    root = math.sqrt(0.5)
    assert rates == pytest.approx([1.0, 0.1 + 0.45 * (1 + root), 0.55, 0.1 + 0.45 * (1 - root), 0.1], rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_schedule_warms_up_alike(schedule: Literal["constant", "linear", "cosine"]) -> None:
    rates = [learning_rate(index, lr=1.0, warmup_steps=4, total_steps=8, schedule=schedule, min_share=0.5) for index in range(5)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_constant_stays_at_the_peak_to_the_end() -> None:
    assert learning_rate(99, lr=0.5, warmup_steps=2, total_steps=10, schedule="constant") == 0.5


def test_a_warm_up_longer_than_the_run_never_falls() -> None:
    assert learning_rate(9, lr=1.0, warmup_steps=10, total_steps=5, schedule="linear") == 0.9
    assert learning_rate(10, lr=1.0, warmup_steps=10, total_steps=5, schedule="linear") == 0.0
