"""Global norm, clip coefficient and learning rate."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.algo.gradients import clip_coefficient, global_grad_norm
from shoal.algo.schedule import learning_rate
from tests.helpers.math_cases import assert_close, math_case, numbers


def test_norm_and_coefficient_equal_given_numbers_on_every_rank() -> None:
    case = math_case("M-GRD-01")
    shards = [numbers(shard) for shard in case["inputs"]["shards"]]
    squares = [float(shard.square().sum()) for shard in shards]
    for rank, shard in enumerate(shards):
        others = sum(square for other, square in enumerate(squares) if other != rank)
        norm = float(global_grad_norm([shard], lambda local, others=others: local + others))
        coefficient = clip_coefficient(norm, case["inputs"]["max_norm"])
        assert norm == pytest.approx(case["expected"]["global_norm"], rel=1e-12)
        assert coefficient == pytest.approx(case["expected"]["clip_coefficient"], rel=1e-9)
        assert_close(shard * coefficient, case["expected"]["clipped"][rank])


def test_norm_of_no_gradient_is_zero() -> None:
    assert float(global_grad_norm([])) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_is_not_finite_when_one_element_is_not(bad: float) -> None:
    assert not math.isfinite(float(global_grad_norm([torch.ones(3), torch.tensor([0.0, bad])])))


def test_norm_of_large_float32_gradients_does_not_overflow() -> None:
    assert float(global_grad_norm([torch.full((4,), 1e30)])) == pytest.approx(2e30, rel=1e-6)


def test_small_gradients_are_not_scaled() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0


def test_learning_rate_equals_given_numbers() -> None:
    case = math_case("M-LRS-01")
    inputs, expected = case["inputs"], case["expected"]
    rates = {
        index: learning_rate(int(index), lr=inputs["base_lr"], warmup_steps=inputs["warmup"], total_steps=inputs["total"])
        for index in expected["lr_used_for_update_index"]
    }
    assert rates == pytest.approx(expected["lr_used_for_update_index"], rel=1e-12)
    resumed = learning_rate(
        inputs["checkpoint_after_updates"], lr=inputs["base_lr"], warmup_steps=inputs["warmup"], total_steps=inputs["total"]
    )
    assert resumed == pytest.approx(expected["lr_of_first_update_after_resume"], rel=1e-12)


def test_learning_rate_without_total_stays_at_the_peak_and_with_it_ends_at_zero() -> None:
    assert learning_rate(10_000, lr=0.5, warmup_steps=3) == 0.5
    assert learning_rate(0, lr=0.5) == 0.5
    assert learning_rate(30, lr=0.5, total_steps=20) == 0.0


def test_learning_rate_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="num_updates is -1"):
        learning_rate(-1, lr=1.0)
