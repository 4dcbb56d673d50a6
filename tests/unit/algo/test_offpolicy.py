"""Weights and rejections for the mismatch of engine and trainer."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from shoal.algo import offpolicy
from shoal.config.algorithm import AlgorithmSection
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers

WEIGHT_MODES = list(get_args(AlgorithmSection.model_fields["importance_weights"].annotation))
REJECTION_MODES = list(get_args(AlgorithmSection.model_fields["rejection"].annotation))
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])


def weights_of(old: Tensor, rollout: Tensor, mask: Tensor, mode: str, low: float = 0.5, high: float = 2.0) -> Tensor:
    return offpolicy.importance_weights(old, rollout, mask, importance_weights=mode, importance_low=low, importance_high=high)


def kept_of(old: Tensor, rollout: Tensor, mask: Tensor, mode: str, low: float = 0.5, high: float = 2.0) -> Tensor:
    return offpolicy.kept_sequences(old, rollout, mask, rejection=mode, rejection_low=low, rejection_high=high)


def sums_of(old: Tensor, rollout: Tensor, mask: Tensor, mode: str, rejection: str = "none") -> dict[str, float]:
    sums = offpolicy.correction_sums(
        old,
        rollout,
        mask,
        weights_of(old, rollout, mask, mode),
        kept_of(old, rollout, mask, rejection),
        importance_weights=mode,
        importance_high=2.0,
    )
    return {name: float(value) for name, value in sums.items()}


def test_modes_are_those_of_the_configuration() -> None:
    assert set(offpolicy.IMPORTANCE_WEIGHTS) == set(WEIGHT_MODES)
    assert set(offpolicy.REJECTIONS) == set(REJECTION_MODES)


def test_truncated_weights_equal_given_numbers() -> None:
    case = math_case("M-TIS-01")
    inputs, expected, mask = case["inputs"], case["expected"], mask_of(case["inputs"]["mask"])
    old, rollout = numbers(inputs["train_old_logprobs"]), numbers(inputs["rollout_logprobs"])
    weights = weights_of(old, rollout, mask, "token_truncate", high=inputs["cap"])
    assert_close(weights, expected["weights"])
    # The denominator stays the number of trained tokens.
    assert_close((weights * numbers(inputs["per_token_policy_loss"])).sum() / mask.sum(), expected["weighted_token_mean"])
    assert sums_of(old, rollout, mask, "token_truncate")["importance_capped_fraction"] == 1.0


def test_masked_weights_equal_given_numbers() -> None:
    case = math_case("M-TIS-02")
    inputs, expected, mask = case["inputs"], case["expected"], mask_of(case["inputs"]["mask"])
    old, rollout = numbers(inputs["train_old_logprobs"]), numbers(inputs["rollout_logprobs"])
    assert_close(weights_of(old, rollout, mask, "token_mask", inputs["low"], inputs["high"]), expected["weights"])
    dropped = sums_of(old, rollout, mask, "token_mask")["importance_dropped_fraction"]
    assert dropped / float(mask.sum()) == pytest.approx(expected["dropped_fraction"])


def test_sequence_weights_are_the_bounded_product_at_every_token() -> None:
    old = numbers([[-0.5, -1.0, -0.2], [-2.0, -0.3, 0.0], [0.0, 0.0, 0.0]])
    rollout = numbers([[-0.6, -1.5, -0.1], [-1.0, -0.3, 0.0], [0.0, 0.0, 0.0]])
    first, second = math.exp(0.1 + 0.5 - 0.1), math.exp(-1.0)
    assert_close(weights_of(old, rollout, MASK, "sequence_truncate"), [[first] * 3, [second, second, 0.0], [0.0] * 3])
    assert_close(weights_of(old, rollout, MASK, "sequence_truncate", high=1.5), [[1.5] * 3, [second, second, 0.0], [0.0] * 3])
    assert_close(weights_of(old, rollout, MASK, "sequence_mask"), [[first] * 3, [0.0] * 3, [0.0] * 3])
    assert sums_of(old, rollout, MASK, "sequence_mask")["importance_dropped_fraction"] == 2.0


def test_no_weights_are_ones_on_the_mask() -> None:
    weights = weights_of(torch.zeros(3, 3), torch.full((3, 3), -9.0), MASK, "none")
    assert torch.equal(weights, MASK.float())
    assert sums_of(torch.zeros(3, 3), torch.full((3, 3), -9.0), MASK, "none") == {
        "importance_capped_fraction": 0.0,
        "importance_dropped_fraction": 0.0,
        "rejected_fraction": 0.0,
    }


def test_rejection_tests_the_product_or_the_geometric_mean() -> None:
    old = numbers([[0.3, 0.3, 0.3], [0.8, 0.8, 9.0], [9.0, 9.0, 9.0]])
    rollout = torch.zeros(3, 3, dtype=torch.float64)
    # Sums 0.9 and 1.6, means 0.3 and 0.8; log 2 is 0.69.
    assert kept_of(old, rollout, MASK, "sequence").tolist() == [False, False, True]
    assert kept_of(old, rollout, MASK, "geometric").tolist() == [True, False, True]
    assert kept_of(-old, rollout, MASK, "geometric").tolist() == [True, False, True]
    assert kept_of(old, rollout, MASK, "none").tolist() == [True, True, True]
    assert sums_of(old, rollout, MASK, "none", "sequence")["rejected_fraction"] == 5.0
    assert sums_of(old, rollout, MASK, "none", "geometric")["rejected_fraction"] == 2.0


def test_bounds_are_inclusive() -> None:
    old, mask = numbers([[0.0], [0.0]]), torch.ones(2, 1, dtype=torch.bool)
    assert weights_of(old, old, mask, "token_mask", 1.0, 1.0).tolist() == [[1.0], [1.0]]
    assert kept_of(old, old, mask, "sequence", 1.0, 1.0).tolist() == [True, True]


@pytest.mark.parametrize("mode", WEIGHT_MODES)
@pytest.mark.parametrize("gap", [0.5, -0.5, 90.0, -90.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_long_response_are_finite_and_bounded(mode: str, gap: float, dtype: torch.dtype) -> None:
    old = torch.full((1, 32_768), gap, dtype=dtype)
    weights = weights_of(old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool), mode)
    assert weights.dtype == dtype
    assert bool(weights.isfinite().all())
    assert bool(((weights >= 0) & (weights <= 2.0)).all())


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rejection_of_a_long_response_does_not_overflow(mode: str) -> None:
    old = torch.tensor([[0.5], [-0.5], [0.0], [1e-6]]).expand(4, 32_768)
    kept = kept_of(old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool), mode)
    expected = {"none": [True] * 4, "sequence": [False, False, True, True], "geometric": [True] * 4}
    assert kept.tolist() == expected[mode]


@pytest.mark.parametrize("mode", WEIGHT_MODES)
@pytest.mark.parametrize("rejection", REJECTION_MODES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_slots_change_nothing(mode: str, rejection: str, garbage: float) -> None:
    torch.manual_seed(0)
    old, rollout = torch.randn(3, 3), torch.randn(3, 3)
    dirty_old, dirty_rollout = torch.where(MASK, old, garbage), torch.where(MASK, rollout, -garbage)
    assert torch.equal(weights_of(old, rollout, MASK, mode), weights_of(dirty_old, dirty_rollout, MASK, mode))
    assert torch.equal(kept_of(old, rollout, MASK, rejection), kept_of(dirty_old, dirty_rollout, MASK, rejection))
    assert sums_of(old, rollout, MASK, mode, rejection) == sums_of(dirty_old, dirty_rollout, MASK, mode, rejection)


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_weights_carry_no_gradient(mode: str) -> None:
    old, rollout = torch.zeros(3, 3, requires_grad=True), torch.zeros(3, 3, requires_grad=True)
    assert not weights_of(old, rollout, MASK, mode).requires_grad
    assert not kept_of(old, rollout, MASK, "geometric").requires_grad


def test_unknown_modes_are_refused_with_the_valid_ones() -> None:
    old = torch.zeros(3, 3)
    valid = "none, sequence_mask, sequence_truncate, token_mask, token_truncate"
    with pytest.raises(ConfigError, match=f"importance_weights is 'tokens'; use one of {valid}"):
        weights_of(old, old, MASK, "tokens")
    with pytest.raises(ConfigError, match="rejection is 'mean'; use one of geometric, none, sequence"):
        kept_of(old, old, MASK, "mean")


@pytest.mark.parametrize("mode", WEIGHT_MODES)
def test_batch_without_rows_is_fine(mode: str) -> None:
    nothing, mask = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    assert weights_of(nothing, nothing, mask, mode).shape == (0, 3)
    assert kept_of(nothing, nothing, mask, "sequence").shape == (0,)
    assert sums_of(nothing, nothing, mask, mode, "geometric")["rejected_fraction"] == 0.0


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_rows_without_a_response_token_are_kept(mode: str) -> None:
    nothing = torch.zeros(3, 0)
    assert kept_of(nothing, nothing, torch.zeros(3, 0, dtype=torch.bool), mode).tolist() == [True] * 3
