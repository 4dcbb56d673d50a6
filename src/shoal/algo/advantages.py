"""Advantage estimators that need no groups: one pure function each, listed in `shoal.config.functions`.

Legend: B sequences of this rank, T response tokens, G groups of the whole batch. Keyword-only settings carry the names of configuration
fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.masking import SumOverRanks, deviations_from, masked_moments, one_rank, select, whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """This rank's part of a batch.

    rewards: [B, T] per-token reward, KL penalty already included; NaN at a trained token means that the row is not scored: it gets no
        advantage and enters no statistic.
    response_mask: [B, T] bool; False tokens neither give nor take credit.
    values: [B, T] critic estimate before each token; None without a critic.
    group_index: [B] int64, number of the sequence's group, the same numbering on all ranks; None if no estimator needs it.
    num_groups: G.
    bootstrap_values: [B] value of the state after the last token, 0 where the response terminated; None is 0 everywhere.
    baselines: [B] reward of each prompt's greedy answer, NaN where there is none; None if no estimator needs it.
    components: [B, C] named parts of the reward, NaN where a scorer gave none; None if no estimator needs them.
    component_weights: C weights, in the order of the columns of components.
    """

    rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    group_index: Tensor | None = None
    num_groups: int = 0
    bootstrap_values: Tensor | None = None
    baselines: Tensor | None = None
    components: Tensor | None = None
    component_weights: tuple[float, ...] = ()


def scored_mask(inputs: AdvantageInputs) -> Tensor:
    """[B, T] bool: the trained tokens of scored rows."""
    missing = select(inputs.rewards, inputs.response_mask).isnan().any(dim=1, keepdim=True)
    return inputs.response_mask & ~missing


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate token advantages by backward accumulation; not whitened.

    Masked tokens are skipped without decay: the successor of a token is the next trained token.

    Args:
        rewards: [B, T] per-token reward, KL penalty already included.
        values: [B, T] critic estimate before each token.
        response_mask: [B, T] bool; False tokens neither give nor take credit.
        gamma: discount per token.
        lam: weight of longer returns; 1 is Monte Carlo, 0 one step.
        bootstrap_values: [B] value after the last trained token; None is 0 (the response terminated).
    Returns: advantages, returns (advantages + values): each [B, T], 0 where masked, no gradient.
    Raises: ValueError: shapes differ.
    Source: Schulman et al. 2015, eq. 16.
    """
    rewards, values = select(rewards.detach(), response_mask), select(values.detach(), response_mask)
    zero = values.new_zeros(values.shape[0])
    next_value = zero if bootstrap_values is None else bootstrap_values.detach().to(values.dtype)
    next_advantage = zero
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        trained = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(trained, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
        columns.append(next_advantage)
    advantages = select(torch.stack(columns[::-1], dim=1), response_mask) if columns else torch.zeros_like(values)
    return advantages, advantages + values


def gae_estimator(
    inputs: AdvantageInputs,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    gamma: float,
    lam: float,
    whiten_advantages: bool,
) -> tuple[Tensor, Tensor]:
    """`gae`, whitened over the whole batch if asked; returns stay as they are, and are the values where a row is not scored.

    Returns: advantages, returns: each [B, T], 0 where masked.
    Raises: ValueError: no values, or shapes differ.
    """
    if inputs.values is None:
        raise ValueError("gae needs values; run the critic or choose a group estimator")
    scored = scored_mask(inputs)
    advantages, returns = gae(
        select(inputs.rewards, scored), inputs.values, inputs.response_mask, gamma=gamma, lam=lam, bootstrap_values=inputs.bootstrap_values
    )
    returns = torch.where(scored, returns, select(inputs.values.detach(), inputs.response_mask))
    if whiten_advantages:
        advantages = whiten(advantages, scored, masked_moments(advantages, scored, sum_over_ranks))
    return select(advantages, scored), returns


def reward_to_go(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of this and later trained tokens' rewards: [B, T], 0 where masked."""
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, response_mask, gamma=gamma, lam=1.0)[0]


def reinforce_pp_estimator(
    inputs: AdvantageInputs,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Reward to go, normalised once over all trained tokens of the batch: (return - mean) / sqrt(max(population variance, 1e-8)).

    Returns: advantages, returns: each [B, T], 0 where masked or not scored.
    Source: Hu 2025 (REINFORCE++), eq. 6.
    """
    mask = scored_mask(inputs)
    returns = reward_to_go(inputs.rewards, mask, gamma=gamma)
    moments = masked_moments(returns, mask, sum_over_ranks)
    scaled = deviations_from(moments.mean, returns) * torch.rsqrt(moments.variance().clamp(min=1e-8))
    return select(scaled, mask).to(returns.dtype), returns


def remax_estimator(inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go minus the reward of the prompt's greedy answer; 0 where there is no greedy reward.

    Returns: advantages, returns: each [B, T], 0 where masked or not scored.
    Raises: ValueError: no baselines.
    Source: Li et al. 2023 (ReMax), eq. 4.
    """
    if inputs.baselines is None:
        raise ValueError("remax needs baselines, the reward of one greedy answer per prompt; generate and score it")
    baselines = inputs.baselines.detach().to(inputs.rewards.dtype)[:, None].expand(inputs.response_mask.shape)
    mask = scored_mask(inputs) & ~baselines.isnan()
    returns = reward_to_go(inputs.rewards, mask, gamma=1.0)
    return select(returns - baselines, mask), returns
