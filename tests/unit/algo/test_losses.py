"""Policy and value losses with their gradients and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.aggregation import aggregate, count_trained
from shoal.algo.kl import max_log_gap
from shoal.algo.losses import TokenLoss, cispo_loss, gspo_loss, ppo_loss, reinforce_loss, value_loss
from tests.helpers.math_cases import assert_close, mask_of, math_case, math_cases, numbers


def one_token(loss: Callable[..., TokenLoss], gap: float, advantage: float, **settings: float) -> tuple[float, float]:
    """Loss and gradient of one float32 token with this log-ratio."""
    variable = torch.tensor([[gap]], requires_grad=True)
    terms = loss(variable, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool), **settings)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), variable)
    return float(terms.per_token.detach()), float(gradient)


@pytest.mark.parametrize("case", math_cases("ppo_clip"), ids=lambda case: str(case["id"]))
def test_ppo_equals_given_numbers(case: dict[str, dict[str, list[float]]]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    log_ratio = numbers(inputs["log_ratio"]) if "log_ratio" in inputs else numbers(inputs["ratio"]).log()
    mask = mask_of(inputs["mask"])
    logprobs = (log_ratio - 1.0).requires_grad_()
    loss = ppo_loss(
        logprobs,
        torch.full_like(log_ratio, -1.0),
        numbers(inputs["advantages"]),
        mask,
        clip_low=float(numbers(inputs["clip_low"])),
        clip_high=float(numbers(inputs["clip_high"])),
        dual_clip=float(numbers(inputs["dual_clip_c"])) if "dual_clip_c" in inputs else None,
    )
    torch.autograd.backward(loss.per_token.sum())
    assert logprobs.grad is not None
    count = mask.sum()
    assert_close(loss.per_token.detach(), expected["per_token_loss"])
    assert_close(logprobs.grad, expected["grad_logp_per_token"])
    assert_close(loss.per_token.detach().sum() / count, expected["token_mean"])
    assert_close(loss.sums["clip_fraction"] / count, expected["clipfrac"])
    assert_close(loss.sums["clip_fraction_lower"] / count, expected["clipfrac_lower"])
    if "approx_kl_k1" in expected:
        assert_close(loss.sums["approx_kl"] / count, expected["approx_kl_k1"])
        assert float(loss.maxima["ratio_max_deviation"]) == 0.0


@pytest.mark.parametrize("gap", [20.5, 30.0, 39.0])
def test_ratio_is_exact_where_its_square_fits_float32(gap: float) -> None:
    loss, gradient = one_token(ppo_loss, gap, -1.0, clip_low=0.2, clip_high=0.2)
    assert loss == pytest.approx(math.exp(gap), rel=1e-5)
    assert gradient == pytest.approx(math.exp(gap), rel=1e-5)


@pytest.mark.parametrize("gap", [45.0, 90.0, 200.0])
def test_token_whose_probability_exploded_keeps_its_gradient(gap: float) -> None:
    loss, gradient = one_token(ppo_loss, gap, -1.0, clip_low=0.2, clip_high=0.2)
    nearer, _ = one_token(ppo_loss, gap - 1.0, -1.0, clip_low=0.2, clip_high=0.2)
    assert math.inf > loss > nearer
    assert gradient == pytest.approx(math.exp(max_log_gap(torch.float32)), rel=1e-5)


def test_dual_clip_bounds_an_exploded_token_and_stops_its_gradient() -> None:
    assert one_token(ppo_loss, 200.0, -1.0, clip_low=0.2, clip_high=0.2, dual_clip=3.0) == (3.0, 0.0)


SEQUENCES: dict[str, list[Any]] = {
    "logprobs": [[-1.0, -0.5, -2.0, 0.0], [-0.3, -0.4, 0.0, 0.0], [-1.5, -0.1, -0.2, -0.9]],
    "old": [[-1.2, -0.6, -1.9, 0.0], [-0.8, -0.7, 0.0, 0.0], [-1.4, -0.3, -0.1, -0.2]],
    "mask": [[True, True, True, False], [True, True, False, False], [True, False, True, True]],
}


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(SEQUENCES["logprobs"]), numbers(SEQUENCES["old"]), mask_of(SEQUENCES["mask"])


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.03, 0.04), (0.5, 2.0)])
def test_gspo_has_the_value_and_gradient_of_the_sequence_ratio(clip: tuple[float, float]) -> None:
    logprobs, old, mask = sequences()
    advantages = numbers([1.0, -0.5, -2.0])[:, None].expand(3, 4)
    low, high = clip

    def objective(new: Tensor) -> Tensor:
        """The definition: mean over sequences of the clipped surrogate of s."""
        ratio = torch.where(mask, new - old, 0.0).sum(dim=1).div(mask.sum(dim=1)).exp()
        return torch.maximum(-advantages[:, 0] * ratio, -advantages[:, 0] * ratio.clamp(1 - low, 1 + high)).mean()

    def loss(new: Tensor) -> Tensor:
        terms = gspo_loss(new, old, advantages, mask, clip_low=low, clip_high=high)
        return aggregate(terms.per_token, mask, count_trained([mask]), loss_aggregation="seq_mean_token_mean")

    variable = logprobs.requires_grad_()
    expected, actual = objective(variable), loss(variable)
    assert_close(actual.detach(), expected.item())
    assert_close(torch.autograd.grad(actual, variable)[0], torch.autograd.grad(expected, variable)[0].tolist())


def test_gspo_with_an_advantage_per_token_weighs_each_token_by_its_own() -> None:
    logprobs, old, mask = sequences()
    advantages = numbers([[1.0, 2.0, -1.0, 9.0], [0.5, 0.5, 9.0, 9.0], [-1.0, 9.0, 0.0, 3.0]])
    variable = logprobs.requires_grad_()
    terms = gspo_loss(variable, old, advantages, mask, clip_low=0.9, clip_high=9.0)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), variable)
    ratio = torch.where(mask, numbers(SEQUENCES["logprobs"]) - old, 0.0).sum(dim=1, keepdim=True).div(mask.sum(dim=1, keepdim=True)).exp()
    assert_close(gradient, torch.where(mask, -advantages * ratio, 0.0).tolist())
    assert_close(terms.per_token.detach(), torch.where(mask, -advantages * ratio, 0.0).tolist())


def test_gspo_counts_the_clipped_sequences_at_every_token() -> None:
    logprobs, old, mask = sequences()
    terms = gspo_loss(logprobs, old, torch.ones(3, 4, dtype=torch.float64), mask, clip_low=0.2, clip_high=0.2)
    # Mean log-ratios 0.0667, 0.4 and -0.3: only the second is above 1.2 with a positive advantage.
    assert float(terms.sums["clip_fraction"]) == 2.0
    ratios = [math.exp(0.2 / 3), math.exp(0.4), math.exp(-0.9 / 3)]
    assert float(terms.sums["ratio"]) == pytest.approx(3 * ratios[0] + 2 * ratios[1] + 3 * ratios[2])
    assert float(terms.maxima["ratio_max_deviation"]) == pytest.approx(ratios[1] - 1)


def test_cispo_weighs_the_policy_gradient_by_the_clipped_ratio() -> None:
    variable = numbers([[-1.0, -0.5, -2.0, -0.1]]).requires_grad_()
    log_ratio = numbers([[0.1, 1.0, -1.0, 0.0]])
    advantages = numbers([[1.0, 2.0, -1.0, 5.0]])
    mask = torch.tensor([[True, True, True, False]])
    terms = cispo_loss(variable, variable.detach() - log_ratio, advantages, mask, clip_low=0.2, clip_high=0.28)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), variable)
    weights = [math.exp(0.1), 1.28, 0.8, 0.0]
    assert_close(gradient, [[-w * a for w, a in zip(weights, [1.0, 2.0, -1.0, 5.0], strict=True)]])
    assert_close(terms.per_token.detach(), [[math.exp(0.1), 1.28 * 2 * 0.5, -0.8 * 2.0, 0.0]])
    assert float(terms.sums["clip_fraction"]) == 2.0


def test_reinforce_is_the_plain_policy_gradient_whatever_the_old_policy_was() -> None:
    variable = numbers([[-1.0, -0.5, -0.1]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    terms = reinforce_loss(variable, numbers([[-3.0, -0.5, 0.0]]), numbers([[2.0, -1.0, 7.0]]), mask)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), variable)
    assert_close(gradient, [[-2.0, 1.0, 0.0]])
    assert_close(terms.per_token.detach(), [[2.0, -0.5, 0.0]])
    assert float(terms.sums["ratio"]) == pytest.approx(math.exp(2.0) + 1.0)


def test_value_loss_equals_given_numbers() -> None:
    case = math_case("M-VAL-01")
    inputs, expected = case["inputs"], case["expected"]
    mask = mask_of(inputs["mask"])
    loss = value_loss(
        numbers(inputs["values"]), numbers(inputs["old_values"]), numbers(inputs["returns"]), mask, value_clip=inputs["clip_range"]
    )
    assert_close(loss.per_token, expected["per_token"])
    assert_close(loss.per_token.sum() / mask.sum(), expected["token_mean"])
    assert_close(loss.sums["value_clip_fraction"] / mask.sum(), expected["clipfrac"])


def test_value_loss_without_clip_is_half_the_squared_error() -> None:
    values, returns = torch.tensor([[3.0, -1.0]]), torch.tensor([[1.0, 1.0]])
    loss = value_loss(values, torch.zeros(1, 2), returns, torch.ones(1, 2, dtype=torch.bool), value_clip=None)
    assert loss.per_token.tolist() == [[2.0, 2.0]]
    assert float(loss.sums["value_clip_fraction"]) == 0.0


def test_value_gradient_is_zero_where_the_clipped_branch_is_larger() -> None:
    values = torch.tensor([[-0.2]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    torch.autograd.backward(value_loss(values, torch.tensor([[0.1]]), torch.tensor([[-0.5]]), mask, value_clip=0.2).per_token.sum())
    assert values.grad is not None
    assert float(values.grad) == 0.0


@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, cispo_loss])
def test_log_ratio_that_is_not_a_number_gives_a_gradient_that_is_none(loss: Callable[..., TokenLoss]) -> None:
    """A finite gradient would pass for a good step, and the update be made."""
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    old_logprobs = torch.tensor([[math.nan, -1.0]])
    terms = loss(logprobs, old_logprobs, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), logprobs)
    assert terms.per_token[0, 0].isnan()
    assert gradient[0, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("ratio", "advantage", "settings"),
    [
        (3.0, -1.0, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        (10.0, -0.7, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 10.0}),
        (0.35, -1.0, {"clip_low": 0.65, "clip_high": 0.2}),
        (3.6, 1.3, {"clip_low": 0.2, "clip_high": 2.6}),
    ],
)
def test_ratio_on_a_bound_is_not_clipped(ratio: float, advantage: float, settings: dict[str, float], dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[ratio]], dtype=dtype).log().requires_grad_()
    for variable in (logprobs, torch.nextafter(logprobs.detach(), torch.full_like(logprobs, torch.inf)).requires_grad_()):
        mask = torch.ones(1, 1, dtype=torch.bool)
        terms = ppo_loss(variable, torch.zeros_like(variable), torch.full_like(variable, advantage), mask, **settings)
        (gradient,) = torch.autograd.grad(terms.per_token.sum(), variable)
        assert float(gradient) == pytest.approx(-advantage * ratio, rel=1e-6)
        assert float(terms.sums["clip_fraction"]) == float(terms.sums["clip_fraction_lower"]) == 0
