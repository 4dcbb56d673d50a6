"""Advantage estimators that compare the samples of one prompt: one pure function each, listed in `shoal.config.functions`.

Legend: B sequences of this rank, T response tokens, G groups of the whole batch. Keyword-only settings carry the names of configuration
fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs, scored_mask
from shoal.algo.lookup import lookup
from shoal.algo.masking import SumOverRanks, deviations_from, masked_moments, one_rank, quotient, select, whiten


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
    deviations = select(deviations_from(means[group_index], clean), scored)
    spreads = sum_over_ranks(empty.index_add(0, group_index, deviations.square()))
    return GroupStatistics(size=sizes[group_index], mean=means[group_index], sum_sq_dev=spreads[group_index])


def frac_zero_std(statistics: GroupStatistics, group_index: Tensor, num_groups: int, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """Share of the groups with a scored member that have no spread, a float64 scalar; 0 without such groups.

    Args: as `group_statistics`, and what it returned.
    """
    empty = torch.zeros(num_groups, dtype=torch.float64, device=group_index.device)
    present = empty.index_add(0, group_index, (statistics.size > 0).double())
    flat = empty.index_add(0, group_index, ((statistics.size > 0) & (statistics.sum_sq_dev == 0)).double())
    present, flat = sum_over_ranks(torch.stack((present, flat))).unbind()
    return (flat > 0).sum().double() / (present > 0).sum().clamp(min=1)


def centred_scores(scores: Tensor, statistics: GroupStatistics, *, group_baseline: str = "mean") -> Tensor:
    """Score minus its group's baseline, [B] float64; exactly 0 for groups without spread and for unscored sequences.

    Args:
        scores: [B] outcome; NaN is not scored.
        statistics: of the groups, from `group_statistics`.
        group_baseline: `mean` of the group, or `leave_one_out`: of its other members.
    Raises: ConfigError: unknown group_baseline.
    """
    others = lookup(_BASELINES, "group_baseline", group_baseline)
    centred = deviations_from(statistics.mean, scores)
    if others:
        centred = centred * statistics.size / (statistics.size - others).clamp(min=1.0)
    return select(centred, ~scores.isnan() & (statistics.sum_sq_dev > 0))


_BASELINES = {"mean": 0, "leave_one_out": 1}
"""How many members, the sequence itself, are left out of its baseline."""

_DIVISORS: Mapping[str, int | None] = {"sample": 1, "population": 0, "none": None}
"""ddof of the standard deviation that divides; None divides by nothing."""


def grpo_advantages(
    scores: Tensor,
    group_index: Tensor,
    num_groups: int,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
    group_baseline: str = "mean",
) -> Tensor:
    """(score - baseline) / (group standard deviation + eps); 0 for groups without spread and for unscored sequences.

    The deviation is always that of the whole group: one of the other members only may be near 0 and the quotient in the thousands.

    Args:
        scores: [B] outcome; NaN is not scored.
        group_index: [B] int64.
        num_groups: G.
        group_std: `sample` (n - 1), `population` (n) or `none` (no division: Dr. GRPO).
        group_eps: added to the standard deviation.
        group_baseline: `mean` of the group, or `leave_one_out`: of its other members.
    Returns: [B], dtype of scores.
    Raises: ConfigError: unknown group_std or group_baseline.
    Source: Shao et al. 2024, section 4.1.2; without division Liu et al. 2025.
    """
    ddof = lookup(_DIVISORS, "group_std", group_std)
    statistics = group_statistics(scores, group_index, num_groups, sum_over_ranks)
    centred = centred_scores(scores, statistics, group_baseline=group_baseline)
    return _divided(centred, statistics, ddof, group_eps).to(scores.dtype)


def _divided(centred: Tensor, statistics: GroupStatistics, ddof: int | None, group_eps: float) -> Tensor:
    return centred if ddof is None else quotient(centred, statistics.std(ddof) + group_eps)


def rloo_advantages(scores: Tensor, group_index: Tensor, num_groups: int, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """Score minus the mean of the other members' scores; 0 for a group of one and for unscored sequences.

    Args: as `grpo_advantages`.
    Returns: [B], dtype of scores.
    Source: Kool et al. 2019; Ahmadian et al. 2024, eq. 8.
    """
    statistics = group_statistics(scores, group_index, num_groups, sum_over_ranks)
    return centred_scores(scores, statistics, group_baseline="leave_one_out").to(scores.dtype)


def gdpo_advantages(
    components: Tensor,
    weights: Sequence[float],
    group_index: Tensor,
    num_groups: int,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
) -> Tensor:
    """Decoupled normalisation: each component in its group, weighted sum, then once over the batch.

    a_k = (r_k - mean_group(r_k)) / (std_group(r_k) + eps); s = sum_k w_k a_k; advantage = (s - mean_batch(s)) / (std_batch(s) + eps).
    Components of small spread then count by their weight, not by their scale. With group_std `none` neither step divides.

    Args:
        components: [B, C]; NaN is not scored. Such a sequence enters no statistic of that component, and gets no advantage.
        weights: C.
        group_index, num_groups, group_std, group_eps: as `grpo_advantages`; both standard deviations have the divisor of group_std.
    Returns: [B], dtype of components; exactly 0 where no component of the group has spread.
    Raises: ConfigError: unknown group_std. ValueError: not one weight per component.
    Source: Liu et al. 2026 (GDPO).
    """
    if len(weights) != components.shape[1]:
        raise ValueError(f"{len(weights)} weights for {components.shape[1]} components; give one weight per component")
    ddof = lookup(_DIVISORS, "group_std", group_std)
    scored = ~components.isnan().any(dim=1)
    total = torch.zeros(components.shape[0], dtype=torch.float64, device=components.device)
    has_spread = torch.zeros_like(scored)
    for weight, column in zip(weights, components.unbind(dim=1), strict=True):
        statistics = group_statistics(column, group_index, num_groups, sum_over_ranks)
        total = total + weight * _divided(centred_scores(column, statistics), statistics, ddof, group_eps)
        has_spread |= statistics.sum_sq_dev > 0
    moments = masked_moments(total, scored, sum_over_ranks)
    shifted = deviations_from(moments.mean, total)
    scaled = shifted if ddof is None else quotient(shifted, moments.variance(ddof).sqrt() + group_eps)
    # The mean of the batch may be off by rounding: a group without any spread stays exactly 0.
    return select(scaled, scored & has_spread).to(components.dtype)


def _outcomes(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Sum of each row's rewards, [B] float64 (NaN if any trained token's is NaN, or no token is trained), and its group.

    In float32 the sum, and with it whether a group has spread, would depend on the width of the padding.
    """
    if inputs.group_index is None:
        raise ValueError("a group estimator needs group_index and num_groups")
    scores = select(inputs.rewards.detach().double(), inputs.response_mask).sum(dim=1)
    return torch.where(inputs.response_mask.any(dim=1), scores, torch.nan), inputs.group_index


def _spread_over_tokens(advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    mask = inputs.response_mask
    tokens = select(advantages.to(inputs.rewards.dtype)[:, None].expand(mask.shape), mask)
    return tokens, tokens


def grpo_estimator(
    inputs: AdvantageInputs,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
    group_baseline: str = "mean",
) -> tuple[Tensor, Tensor]:
    """`grpo_advantages` of the rows' reward sums, the same for every trained token. Returns: advantages twice, each [B, T]."""
    scores, group_index = _outcomes(inputs)
    advantages = grpo_advantages(
        scores, group_index, inputs.num_groups, sum_over_ranks, group_std=group_std, group_eps=group_eps, group_baseline=group_baseline
    )
    return _spread_over_tokens(advantages, inputs)


def dr_grpo_estimator(
    inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank, *, group_baseline: str = "mean"
) -> tuple[Tensor, Tensor]:
    """`grpo_estimator` without division by a standard deviation. Returns: advantages twice, each [B, T].

    Source: Liu et al. 2025 (Dr. GRPO), section 3.2; goes with loss_aggregation seq_mean_token_sum_norm.
    """
    return grpo_estimator(inputs, sum_over_ranks, group_std="none", group_baseline=group_baseline)


def rloo_estimator(inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> tuple[Tensor, Tensor]:
    """`rloo_advantages` of the rows' reward sums, the same for every trained token. Returns: advantages twice, each [B, T]."""
    scores, group_index = _outcomes(inputs)
    return _spread_over_tokens(rloo_advantages(scores, group_index, inputs.num_groups, sum_over_ranks), inputs)


def gdpo_estimator(
    inputs: AdvantageInputs,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    group_std: str = "sample",
    group_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`gdpo_advantages` of the rows' components, the same for every trained token. Returns: advantages twice, each [B, T].

    The rewards of the tokens only say which rows are scored: a KL penalty in the reward has no place in this estimator.

    Raises: ValueError: no components or no groups.
    """
    scores, group_index = _outcomes(inputs)
    if inputs.components is None:
        raise ValueError("gdpo needs components; name them and their weights in reward.weights")
    components = torch.where(scores.isnan()[:, None], torch.nan, inputs.components.detach().double())
    weights, num_groups = inputs.component_weights, inputs.num_groups
    advantages = gdpo_advantages(components, weights, group_index, num_groups, sum_over_ranks, group_std=group_std, group_eps=group_eps)
    return _spread_over_tokens(advantages, inputs)


def reinforce_pp_baseline_estimator(inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> tuple[Tensor, Tensor]:
    """Score minus group mean at every trained token, whitened over all trained tokens of the batch: sample variance + 1e-8.

    Returns: advantages twice, each [B, T], 0 where masked or not scored. A group without spread gets the shift of the batch.
    Source: Hu 2025 (REINFORCE++-baseline), eq. 8 and 9.
    """
    scores, group_index = _outcomes(inputs)
    centred = centred_scores(scores, group_statistics(scores, group_index, inputs.num_groups, sum_over_ranks))
    mask = scored_mask(inputs)
    tokens = select(centred[:, None].expand(mask.shape), mask)
    whitened = whiten(tokens, mask, masked_moments(tokens, mask, sum_over_ranks), ddof=1).to(inputs.rewards.dtype)
    return whitened, whitened
