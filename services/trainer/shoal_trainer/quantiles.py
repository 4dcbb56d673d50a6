"""Exact quantiles of numbers that lie on all ranks.

Legend: N numbers of this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_trainer.distributed import RankContext

SHARES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

MAX_LOG = 80.0
"""Logarithms beyond this size are brought back to it: their exponential is still a number that can be written down."""


def ratio_quantiles(name: str, log_ratios: Sequence[Tensor], context: RankContext) -> dict[str, float]:
    """Quantiles of exp(log_ratios) over all ranks, by linear interpolation; nothing if there are no numbers. Enters a collective.

    Args:
        name: prefix of the metrics, such as "ratio" for ratio_p01, ratio_p50, ratio_p99.
        log_ratios: this rank's numbers, any number of [N] tensors.
    """
    everywhere = over_all_ranks(torch.cat([torch.zeros(0, device=context.device), *log_ratios]), context)
    if everywhere.numel() == 0:
        return {}
    ordered = everywhere.double().clamp(-MAX_LOG, MAX_LOG).sort().values
    return {f"{name}_{share_name}": _quantile(ordered, share) for share_name, share in SHARES.items()}


def over_all_ranks(own: Tensor, context: RankContext) -> Tensor:
    """All ranks' numbers, [sum of N] in the order of the ranks, the same on each: a sum of vectors that are 0 outside a rank's own part."""
    counts = torch.zeros(context.world_size, dtype=torch.float64, device=own.device)
    counts[context.rank] = own.numel()
    lengths = [int(length) for length in context.sum_over_ranks(counts).tolist()]
    start = sum(lengths[: context.rank])
    joined = torch.zeros(sum(lengths), dtype=own.dtype, device=own.device)
    joined[start : start + own.numel()] = own
    return context.sum_over_ranks(joined) if joined.numel() else joined


def _quantile(ordered: Tensor, share: float) -> float:
    position = share * (ordered.numel() - 1)
    below = int(position)
    low, high = ordered[below : below + 2].exp().tolist() if below + 1 < ordered.numel() else [ordered[below].exp().item()] * 2
    return float(low + (high - low) * (position - below))
