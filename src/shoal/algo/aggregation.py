"""How per-token losses become one number, independent of the split over micro-batches and ranks.

Legend: B sequences of a micro-batch, T response tokens. The loss of an optimizer step is the plain sum of `aggregate` over its
micro-batches and ranks. Gradients must be summed over ranks; where a framework averages them, multiply by the number of ranks first.
A new aggregation is one function and one line in `LOSS_AGGREGATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.lookup import lookup
from shoal.algo.masking import SumOverRanks, one_rank, select


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCounts:
    """Global counts of one optimizer step, over all micro-batches and ranks.

    num_tokens: trained tokens. num_sequences: sequences with at least one of them.
    """

    num_tokens: float
    num_sequences: float


def local_counts(response_mask: Tensor) -> Tensor:
    """Return [trained tokens, sequences with one] of a [B, T] mask as float64 [2]; add over micro-batches and ranks."""
    return torch.stack((response_mask.sum(), response_mask.any(dim=1).sum())).double()


def count_trained(response_masks: list[Tensor], sum_over_ranks: SumOverRanks = one_rank) -> TrainedCounts:
    """Count a whole optimizer step: this rank's [B, T] masks, then the other ranks'.

    Raises: ValueError: no mask (pass an empty one, so that the rank still takes part in the reduction).
    """
    if not response_masks:
        raise ValueError("no response mask; pass an empty [0, T] mask for a rank without sequences")
    totals = sum_over_ranks(torch.stack([local_counts(mask) for mask in response_masks]).sum(dim=0))
    num_tokens, num_sequences = totals.tolist()
    return TrainedCounts(num_tokens=num_tokens, num_sequences=num_sequences)


def token_weights(
    response_mask: Tensor,
    counts: TrainedCounts,
    *,
    loss_aggregation: str,
    norm_length: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return each token's weight in the step's loss.

    Args:
        response_mask: [B, T] bool.
        counts: of the whole optimizer step.
        loss_aggregation: `token_mean` (every token alike), `seq_mean_token_mean` (every sequence alike, its tokens alike),
            `seq_mean_token_sum` (sum per sequence, mean of sequences), `seq_mean_token_sum_norm` (that, divided by norm_length).
        norm_length: constant divisor in tokens; for seq_mean_token_sum_norm only.
    Returns: [B, T], 0 where masked; all 0 when the step has no trained token.
    Raises: ConfigError: unknown loss_aggregation. ValueError: norm_length missing.
    Source: token_mean Yu et al. 2025 (DAPO); seq_mean_token_mean Shao et al. 2024; seq_mean_token_sum_norm Liu et al. 2025 (Dr. GRPO).
    """
    per_sequence = lookup(LOSS_AGGREGATIONS, "loss_aggregation", loss_aggregation)
    lengths = response_mask.sum(dim=1, keepdim=True).to(dtype)
    weights = per_sequence(lengths, counts, norm_length)
    return select(weights.expand(response_mask.shape), response_mask)


def aggregate(
    per_token: Tensor,
    response_mask: Tensor,
    counts: TrainedCounts,
    *,
    loss_aggregation: str,
    norm_length: float | None = None,
) -> Tensor:
    """Return this micro-batch's part of the step's loss: the weighted sum of its tokens.

    Args:
        per_token: [B, T]; masked slots may hold anything.
        response_mask, counts, loss_aggregation, norm_length: as `token_weights`.
    Returns: scalar with gradient; 0 with gradient 0 when nothing is trained.
    Raises: as `token_weights`.
    """
    weights = token_weights(response_mask, counts, loss_aggregation=loss_aggregation, norm_length=norm_length, dtype=per_token.dtype)
    return (select(per_token, response_mask) * weights).sum()


def token_mean(lengths: Tensor, counts: TrainedCounts, norm_length: float | None) -> Tensor:
    """1 / trained tokens, [B, 1]."""
    return torch.full_like(lengths, _inverse(counts.num_tokens))


def seq_mean_token_mean(lengths: Tensor, counts: TrainedCounts, norm_length: float | None) -> Tensor:
    """1 / (own length * sequences), [B, 1]."""
    return _inverse(counts.num_sequences) / lengths.clamp(min=1.0)


def seq_mean_token_sum(lengths: Tensor, counts: TrainedCounts, norm_length: float | None) -> Tensor:
    """1 / sequences, [B, 1]."""
    return torch.full_like(lengths, _inverse(counts.num_sequences))


def seq_mean_token_sum_norm(lengths: Tensor, counts: TrainedCounts, norm_length: float | None) -> Tensor:
    """1 / (sequences * norm_length), [B, 1]."""
    if norm_length is None or norm_length <= 0:
        raise ValueError(f"norm_length is {norm_length}; seq_mean_token_sum_norm needs a positive number of tokens")
    return seq_mean_token_sum(lengths, counts, None) / norm_length


def _inverse(count: float) -> float:
    return 1.0 / count if count > 0 else 0.0


LOSS_AGGREGATIONS: Mapping[str, Callable[[Tensor, TrainedCounts, float | None], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
"""([B, 1] lengths, counts, norm_length) -> [B, 1] weight of each token of the sequence."""
