"""Masked tensors and statistics over ranks.

Legend: B sequences, T response tokens. Masked slots may hold NaN or inf: every function selects before it computes, since 0 * NaN is NaN
both in the value and in the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SumOverRanks(Protocol):
    """Adds a small tensor element by element over the ranks of a gang."""

    def __call__(self, local: Tensor) -> Tensor:
        """Return the sum of `local` over all ranks, the same on every rank."""
        ...


def one_rank(local: Tensor) -> Tensor:
    """`SumOverRanks` of a gang of one."""
    return local


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Return x where mask, else 0; the gradient at masked slots is exactly 0.

    Args:
        x: any shape.
        mask: same shape, bool.
    Raises: ValueError: shapes differ or the mask is not bool.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; pass a bool tensor")
    if x.shape != mask.shape:
        raise ValueError(f"tensor of shape {tuple(x.shape)} does not fit mask of shape {tuple(mask.shape)}")
    return torch.where(mask, x, torch.zeros_like(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Statistics of the unmasked elements of a global batch, float64 scalars.

    count: how many. mean: their mean. sum_sq_dev: sum of squared deviations from the mean. All 0 when count is 0.
    """

    count: Tensor
    mean: Tensor
    sum_sq_dev: Tensor

    def variance(self, ddof: int = 0) -> Tensor:
        """Return the variance with divisor count - ddof; 0 where that divisor is not positive."""
        divisor = self.count - ddof
        return torch.where(divisor > 0, self.sum_sq_dev / divisor.clamp(min=1.0), 0.0)


def deviations_from(mean: Tensor, x: Tensor) -> Tensor:
    """x - mean in float64, exactly 0 where they differ by the rounding of the mean only: equal elements have no spread."""
    deviations = x.double() - mean
    return torch.where(deviations.abs() <= 1e-12 * mean.abs(), 0.0, deviations)


def quotient(x: Tensor, spread: Tensor) -> Tensor:
    """x / spread, and 0 where there is no spread, even without an epsilon."""
    is_flat = spread == 0
    return torch.where(is_flat, 0.0, x / torch.where(is_flat, 1.0, spread))


def masked_moments(x: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Moments:
    """Return count, mean and squared deviations of the unmasked elements over all ranks.

    Two passes, two reductions: the mean first, then deviations from it. A single pass (sum of squares) cancels for a large mean.

    Args:
        x: this rank's elements, any shape.
        mask: same shape, bool.
        sum_over_ranks: adds float64 vectors over ranks.
    """
    clean = select(x.detach(), mask).double()
    count, total = sum_over_ranks(torch.stack((mask.sum().double(), clean.sum()))).unbind()
    mean = total / count.clamp(min=1.0)
    deviations = select(deviations_from(mean, clean), mask)
    sum_sq_dev = sum_over_ranks(deviations.square().sum().reshape(1))[0]
    return Moments(count=count, mean=mean, sum_sq_dev=sum_sq_dev)


def whiten(x: Tensor, mask: Tensor, moments: Moments, *, shift_mean: bool = True, ddof: int = 0, eps: float = 1e-8) -> Tensor:
    """Scale to standard deviation 1 and, unless shift_mean is False, shift to mean 0.

    Args:
        x: [B, T] or any shape.
        mask: same shape, bool.
        moments: of the whole batch, from `masked_moments`.
        shift_mean: False keeps the mean.
        ddof: 0 population variance, 1 sample variance.
        eps: added to the variance.
    Returns: same shape and dtype, 0 where masked; 0 also where a constant was shifted.
    """
    scaled = quotient(deviations_from(moments.mean, select(x, mask)), (moments.variance(ddof) + eps).sqrt())
    if not shift_mean:
        scaled = scaled + moments.mean
    return select(scaled, mask).to(x.dtype)
