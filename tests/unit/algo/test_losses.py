"""Policy and value losses with their gradients and metrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.algo.losses import ppo_loss, value_loss
from tests.helpers.math_cases import assert_close, mask_of, math_case, math_cases, numbers

SPECIAL = [float("nan"), float("inf"), -float("inf"), 200.0, -200.0]


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


@pytest.mark.parametrize("garbage", SPECIAL)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ppo_ignores_masked_slots(garbage: float, dual_clip: float | None) -> None:
    mask = torch.tensor([[True, False, True, False]])

    def run(fill: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs = torch.tensor([[-1.0, fill, -0.5, fill]], requires_grad=True)
        old = torch.tensor([[-1.1, 0.0, -0.9, -fill]])
        advantages = torch.tensor([[1.0, fill, -1.0, -1.0]])
        loss = ppo_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
        torch.autograd.backward(loss.per_token.sum())
        assert logprobs.grad is not None
        return loss.per_token.detach(), logprobs.grad, loss.sums | loss.maxima

    clean, clean_grad, clean_metrics = run(0.0)
    dirty, dirty_grad, dirty_metrics = run(garbage)
    assert torch.equal(clean, dirty)
    assert torch.equal(clean_grad, dirty_grad)
    assert bool((dirty_grad[~mask] == 0).all())
    assert clean_metrics == dirty_metrics


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_ppo_is_finite_for_any_ratio_of_a_trained_token(advantage: float, gap: float) -> None:
    logprobs = torch.tensor([gap], requires_grad=True)
    mask = torch.ones(1, dtype=torch.bool)
    loss = ppo_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), mask, clip_low=0.2, clip_high=0.2)
    torch.autograd.backward(loss.per_token.sum())
    assert logprobs.grad is not None
    assert bool(loss.per_token.isfinite().all())
    assert bool(logprobs.grad.isfinite().all())


def test_ppo_of_nothing_is_zero() -> None:
    empty = torch.zeros(0, 4)
    loss = ppo_loss(empty, empty, empty, empty.bool(), clip_low=0.2, clip_high=0.2)
    assert loss.per_token.shape == (0, 4)
    assert float(loss.maxima["ratio_max_deviation"]) == 0.0


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


@pytest.mark.parametrize("garbage", SPECIAL)
def test_value_loss_ignores_masked_slots(garbage: float) -> None:
    values = torch.tensor([[0.5, garbage]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss = value_loss(values, torch.tensor([[0.1, garbage]]), torch.tensor([[1.0, garbage]]), mask, value_clip=0.2)
    torch.autograd.backward(loss.per_token.sum())
    assert values.grad is not None
    assert float(loss.per_token[0, 0]) == pytest.approx(0.245)
    assert float(values.grad[0, 1]) == 0.0
    assert bool(loss.sums["value"].isfinite())


def test_value_gradient_is_zero_where_the_clipped_branch_is_larger() -> None:
    values = torch.tensor([[-0.2]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    torch.autograd.backward(value_loss(values, torch.tensor([[0.1]]), torch.tensor([[-0.5]]), mask, value_clip=0.2).per_token.sum())
    assert values.grad is not None
    assert float(values.grad) == 0.0
