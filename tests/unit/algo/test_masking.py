"""Whitening and masked statistics."""

from __future__ import annotations

import pytest
import torch

from shoal.algo.masking import masked_moments, select, whiten
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("shift", [True, False])
def test_whiten_equals_given_numbers(ddof: int, shift: bool) -> None:
    case = math_case("M-WHI-01")
    values, mask = numbers(case["inputs"]["values"]), mask_of(case["inputs"]["mask"])
    whitened = whiten(values, mask, masked_moments(values, mask), shift_mean=shift, ddof=ddof, eps=case["inputs"]["eps"])
    assert_close(whitened, case["expected"][f"ddof{ddof}_shift{shift}"])


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("part", ["a", "b"])
def test_whiten_of_one_token_and_of_constants_is_zero(part: str, ddof: int) -> None:
    case = math_case("M-WHI-02")
    values, mask = numbers(case["inputs"][part]["values"]), mask_of(case["inputs"][part]["mask"])
    whitened = whiten(values, mask, masked_moments(values, mask), ddof=ddof)
    assert_close(whitened, case["expected"][f"{part}_ddof{ddof}"])


def test_moments_keep_precision_when_the_mean_is_large() -> None:
    values = 1e8 + torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    moments = masked_moments(values, torch.ones(1, 4, dtype=torch.bool))
    assert float(moments.variance()) == pytest.approx(1.25, rel=1e-12)


def test_moments_of_nothing_are_zero() -> None:
    values, mask = torch.full((2, 2), torch.nan), torch.zeros(2, 2, dtype=torch.bool)
    moments = masked_moments(values, mask)
    assert [float(moments.count), float(moments.mean), float(moments.variance())] == [0.0, 0.0, 0.0]
    assert torch.equal(whiten(values, mask, moments), torch.zeros(2, 2))


def test_whiten_keeps_the_dtype() -> None:
    values, mask = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert whiten(values, mask, masked_moments(values, mask)).dtype == torch.float32


def test_select_has_zero_gradient_at_masked_slots() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    torch.autograd.backward(select(x, torch.tensor([True, False, False])).square().sum())
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(("mask", "message"), [(torch.ones(2), "bool"), (torch.ones(3, dtype=torch.bool), "does not fit")])
def test_select_refuses_a_wrong_mask(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(torch.zeros(2), mask)


@pytest.mark.parametrize("value", [0.35, 1 / 3, -7.1, 1e6 + 0.1])
def test_equal_elements_have_no_spread_and_whiten_to_exact_zeros(value: float) -> None:
    x, mask = torch.full((7, 3), value, dtype=torch.float64), torch.ones(7, 3, dtype=torch.bool)
    moments = masked_moments(x, mask)
    assert float(moments.sum_sq_dev) == 0.0
    assert torch.equal(whiten(x, mask, moments), torch.zeros(7, 3, dtype=torch.float64))


def test_whiten_needs_no_epsilon_and_hides_no_nan() -> None:
    x, mask = torch.tensor([[0.25, 0.25], [0.25, torch.nan]], dtype=torch.float64), torch.tensor([[True, True], [True, False]])
    assert torch.equal(whiten(x, mask, masked_moments(x, mask), eps=0.0), torch.zeros(2, 2, dtype=torch.float64))
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert bool(whiten(x, everything, masked_moments(x, everything)).isnan().all())
