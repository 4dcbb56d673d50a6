"""What holds for every registered loss: a new line of the registry is covered by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shoal.algo import registry
from shoal.algo.aggregation import aggregate, count_trained
from shoal.algo.losses import TokenLoss
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import POLICY_LOSSES, VALUE_LOSSES

Loss = Callable[..., TokenLoss]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 1e30, 200.0, -200.0]

VARIANTS: list[dict[str, object]] = [
    *[dict[str, object](policy_loss=name) for name in POLICY_LOSSES],
    {"policy_loss": "ppo", "dual_clip": 3.0, "clip_high": 0.28},
    *[dict[str, object](value_loss=name) for name in VALUE_LOSSES],
    {"value_loss": "clipped", "value_clip": None},
]
POLICY_VARIANTS = [variant for variant in VARIANTS if "policy_loss" in variant]


def name_of(variant: Mapping[str, object]) -> str:
    return "-".join(str(value) for value in variant.values())


def loss_of(variant: Mapping[str, object]) -> Loss:
    algorithm = AlgorithmSection.model_validate(variant)
    return registry.policy_loss(algorithm) if "policy_loss" in variant else registry.value_loss(algorithm)


def batch(seed: int) -> tuple[list[Tensor], Tensor]:
    """What is trained, the old ones, advantages or returns; a row without a trained token."""
    torch.manual_seed(seed)
    mask = torch.rand(5, 6) < 0.6
    mask[2] = False
    first = -torch.rand(5, 6)
    return [first, first + 0.3 * torch.randn(5, 6), torch.randn(5, 6)], mask


def run(loss: Loss, tensors: list[Tensor], mask: Tensor) -> tuple[TokenLoss, Tensor]:
    variable = tensors[0].clone().requires_grad_()
    result = loss(variable, *tensors[1:], mask)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), variable)
    return result, gradient


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("garbage", SPECIAL)
def test_loss_ignores_what_masked_slots_hold(variant: dict[str, object], garbage: float) -> None:
    tensors, mask = batch(0)
    clean, clean_gradient = run(loss_of(variant), tensors, mask)
    fills = (garbage, -garbage, garbage)
    dirty, dirty_gradient = run(loss_of(variant), [torch.where(mask, x, fill) for x, fill in zip(tensors, fills, strict=True)], mask)
    assert torch.equal(clean.per_token, dirty.per_token)
    assert torch.equal(clean_gradient, dirty_gradient)
    assert bool((dirty_gradient[~mask] == 0).all())
    assert bool((dirty.per_token[~mask] == 0).all())
    assert clean.sums == dirty.sums
    assert clean.maxima == dirty.maxima


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_loss_of_a_row_does_not_depend_on_its_neighbours_or_its_padding(variant: dict[str, object]) -> None:
    tensors, mask = batch(1)
    whole, gradient = run(loss_of(variant), tensors, mask)
    sums = dict.fromkeys(whole.sums, 0.0)
    for row in range(5):
        padded = [torch.nn.functional.pad(x[row : row + 1], (0, 2), value=torch.nan) for x in tensors]
        alone, alone_gradient = run(loss_of(variant), padded, torch.nn.functional.pad(mask[row : row + 1], (0, 2)))
        torch.testing.assert_close(alone.per_token[0, :6], whole.per_token[row], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(alone_gradient[0, :6], gradient[row], rtol=1e-6, atol=1e-7)
        sums = {name: sums[name] + float(value) for name, value in alone.sums.items()}
    assert sums == pytest.approx({name: float(value) for name, value in whole.sums.items()}, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_loss_trains_its_first_argument_only_and_counts_without_gradient(variant: dict[str, object]) -> None:
    tensors, mask = batch(2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    result = loss_of(variant)(*leaves, mask)
    torch.autograd.backward(result.per_token.sum())
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    for value in (*result.sums.values(), *result.maxima.values()):
        assert not value.requires_grad
        assert value.numel() == 1
        assert bool(value.isfinite())


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 4)])
def test_loss_of_nothing_is_zero(variant: dict[str, object], shape: tuple[int, int]) -> None:
    nothing, mask = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.bool)
    result, gradient = run(loss_of(variant), [nothing, nothing, nothing], mask)
    assert result.per_token.shape == shape
    assert torch.equal(gradient, torch.zeros(shape))
    assert all(float(value) == 0.0 for value in (*result.sums.values(), *result.maxima.values()))
    counts = count_trained([mask])
    assert float(aggregate(result.per_token.detach(), mask, counts, loss_aggregation="seq_mean_token_mean")) == 0.0


@pytest.mark.parametrize("variant", POLICY_VARIANTS, ids=name_of)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, 88.0, 45.0, 30.0, 21.0, -21.0, -30.0, -88.0, -200.0])
def test_policy_loss_is_finite_for_any_ratio_of_a_trained_token(variant: dict[str, object], advantage: float, gap: float) -> None:
    tensors = [torch.full((1, 2), gap), torch.zeros(1, 2), torch.full((1, 2), advantage)]
    result, gradient = run(loss_of(variant), tensors, torch.ones(1, 2, dtype=torch.bool))
    assert bool(result.per_token.isfinite().all())
    # Squares enter the gradient norm.
    assert bool(gradient.square().isfinite().all())
    assert all(bool(value.isfinite()) for value in (*result.sums.values(), *result.maxima.values()))
    assert bool((gradient * advantage <= 0).all())


@pytest.mark.parametrize("variant", POLICY_VARIANTS, ids=name_of)
def test_first_update_has_the_gradient_of_the_advantage(variant: dict[str, object]) -> None:
    tensors, mask = batch(3)
    result, gradient = run(loss_of(variant), [tensors[0], tensors[0], tensors[2]], mask)
    torch.testing.assert_close(gradient, torch.where(mask, -tensors[2], 0.0), rtol=1e-6, atol=1e-7)
    assert float(result.sums["ratio"]) == float(mask.sum())
    assert float(result.sums["approx_kl"]) == 0.0
    assert float(result.sums.get("clip_fraction", torch.zeros(()))) == 0.0
    assert float(result.maxima["ratio_max_deviation"]) == 0.0
