"""Global gradient norm and clip coefficient of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.algo.masking import SumOverRanks, one_rank


def global_grad_norm(shards: Iterable[Tensor], sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """Return the 2-norm of all gradients over all ranks, the same number on each.

    Args:
        shards: the slices that this rank holds; every element on exactly one rank.
        sum_over_ranks: adds float64 [1] over ranks.
    Returns: float64 scalar; not finite if any element on any rank is not.
    """
    local = [torch.linalg.vector_norm(shard.detach(), dtype=torch.float64).square() for shard in shards]
    total = torch.stack(local).sum() if local else torch.zeros((), dtype=torch.float64)
    return sum_over_ranks(total.reshape(1))[0].sqrt()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor for all gradients: min(1, max_norm / (norm + 1e-6)). The caller skips the update when norm is not finite."""
    return min(1.0, max_norm / (norm + 1e-6))
