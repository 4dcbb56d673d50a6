"""Advantage estimators that compare the samples of one prompt: one pure function each, listed in `shoal.config.functions`.

Legend: B sequences of this rank, T response tokens, G groups of the whole batch. Keyword-only settings carry the names of configuration
fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.masking import SumOverRanks, one_rank, select


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per-sequence view of its group, float64, over scored sequences of all ranks.

    size: [B] scored members. mean: [B]. sum_sq_dev: [B] exactly 0 for a group without spread.
    """

    size: Tensor
    mean: Tensor
    sum_sq_dev: Tensor

    def std(self, ddof: int) -> Tensor:
        """[B] standard deviation with divisor size - ddof; 0 where that divisor is not positive."""
        divisor = self.size - ddof
        return torch.where(divisor > 0, self.sum_sq_dev / divisor.clamp(min=1.0), 0.0).sqrt()


def group_statistics(
    scores: Tensor,
    group_index: Tensor,
    num_groups: int,
    sum_over_ranks: SumOverRanks = one_rank,
) -> GroupStatistics:
    """Return size, mean and spread of each sequence's group; a group may lie on several ranks.

    Args:
        scores: [B] outcome; NaN is not scored and does not count.
        group_index: [B] int64 in [0, num_groups).
        num_groups: G, the same on all ranks.
    """
    scored = ~scores.isnan()
    clean = select(scores.double(), scored)
    empty = torch.zeros(num_groups, dtype=torch.float64, device=scores.device)
    sums = torch.stack((empty.index_add(0, group_index, scored.double()), empty.index_add(0, group_index, clean)))
    sizes, totals = sum_over_ranks(sums).unbind()
    means = totals / sizes.clamp(min=1.0)
    deviations = select(clean - means[group_index], scored)
    # The mean of equal numbers may be off by rounding; such a deviation is no spread.
    deviations = torch.where(deviations.abs() <= 1e-12 * means[group_index].abs(), 0.0, deviations)
    spreads = sum_over_ranks(empty.index_add(0, group_index, deviations.square()))
    return GroupStatistics(size=sizes[group_index], mean=means[group_index], sum_sq_dev=spreads[group_index])


_STD_DDOF = {"sample": 1, "population": 0}


def grpo_advantages(
    scores: Tensor,
    group_index: Tensor,
    num_groups: int,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
) -> Tensor:
    """(score - group mean) / (group standard deviation + eps); 0 for groups without spread and for unscored sequences.

    Args:
        scores: [B] outcome; NaN is not scored.
        group_index: [B] int64.
        num_groups: G.
        group_std: "sample" (n - 1), "population" (n) or "none" (no division: Dr. GRPO).
        group_eps: added to the standard deviation.
    Returns: [B], dtype of scores.
    Raises: ValueError: unknown group_std.
    Source: Shao et al. 2024, section 4.1.2; without division Liu et al. 2025.
    """
    if group_std not in (*_STD_DDOF, "none"):
        raise ValueError(f"group_std is {group_std!r}; use sample, population or none")
    statistics = group_statistics(scores, group_index, num_groups, sum_over_ranks)
    centred = scores.double() - statistics.mean
    if group_std != "none":
        centred = centred / (statistics.std(_STD_DDOF[group_std]) + group_eps)
    return select(centred, ~scores.isnan() & (statistics.sum_sq_dev > 0)).to(scores.dtype)


def rloo_advantages(scores: Tensor, group_index: Tensor, num_groups: int, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """Score minus the mean of the other members' scores; 0 for a group of one and for unscored sequences.

    Args: as `grpo_advantages`.
    Returns: [B], dtype of scores.
    Source: Kool et al. 2019; Ahmadian et al. 2024, eq. 8.
    """
    statistics = group_statistics(scores, group_index, num_groups, sum_over_ranks)
    others = (statistics.size - 1).clamp(min=1.0)
    advantages = (scores.double() - statistics.mean) * statistics.size / others
    return select(advantages, ~scores.isnan() & (statistics.sum_sq_dev > 0)).to(scores.dtype)


def _outcomes(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Sum of each row's rewards (NaN if any trained token's is NaN, or no token is trained) and its group."""
    if inputs.group_index is None:
        raise ValueError("a group estimator needs group_index and num_groups")
    scores = select(inputs.rewards, inputs.response_mask).sum(dim=1)
    return torch.where(inputs.response_mask.any(dim=1), scores, torch.nan), inputs.group_index


def _spread_over_tokens(advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    tokens = select(advantages[:, None].expand(response_mask.shape), response_mask)
    return tokens, tokens


def grpo_estimator(
    inputs: AdvantageInputs,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`grpo_advantages` of the rows' reward sums, the same for every trained token. Returns: advantages twice, each [B, T]."""
    scores, group_index = _outcomes(inputs)
    advantages = grpo_advantages(scores, group_index, inputs.num_groups, sum_over_ranks, group_std=group_std, group_eps=group_eps)
    return _spread_over_tokens(advantages, inputs.response_mask)


def rloo_estimator(inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> tuple[Tensor, Tensor]:
    """`rloo_advantages` of the rows' reward sums, the same for every trained token. Returns: advantages twice, each [B, T]."""
    scores, group_index = _outcomes(inputs)
    return _spread_over_tokens(rloo_advantages(scores, group_index, inputs.num_groups, sum_over_ranks), inputs.response_mask)
