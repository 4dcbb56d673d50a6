"""Per-token losses: one pure function each, listed in `shoal.config.functions`.

Legend: B sequences, T response tokens. A loss returns [B, T] terms; `shoal.algo.aggregation` makes them one number. Keyword-only settings
carry the names of configuration fields. A masked slot may hold anything: its loss and its gradient are 0.

A ratio is exact up to exp(`max_log_gap`) (log-ratios of 39.9 in float32, 319 in float64) and continued as a straight line beyond, see
`safe_exp`. A log-ratio that is cut off instead would take the gradient away from the very tokens that have to be pushed back: those whose
probability has exploded and whose advantage is negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.algo.kl import safe_exp
from shoal.algo.masking import select


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token of a micro-batch.

    per_token: [B, T], 0 where masked.
    sums: metric name -> sum over trained tokens (no gradient). Add over micro-batches and ranks, divide by the number of trained tokens.
    maxima: metric name -> maximum over trained tokens (no gradient), 0 if there are none.
    """

    per_token: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def log_ratio_of(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """log(new / old), [B, T], 0 where masked; gradient to logprobs only."""
    return select(logprobs, response_mask) - select(old_logprobs.detach(), response_mask)


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Mean log-ratio of each sequence's trained tokens: [B, 1], 0 for a sequence without any. The log-ratio is 0 where masked."""
    return log_ratio.sum(dim=1, keepdim=True) / response_mask.sum(dim=1, keepdim=True).clamp(min=1)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate loss with separate bounds, and the dual clip for negative advantages.

    Args:
        logprobs: [B, T] of the policy being trained.
        old_logprobs: [B, T] of the policy that the ratio is measured against; no gradient.
        advantages: [B, T]; no gradient.
        response_mask: [B, T] bool.
        clip_low, clip_high: ratio kept within [1 - clip_low, 1 + clip_high].
        dual_clip: bound c > 1; where the advantage is negative the loss is at most -c * advantage. None is off.
    Returns: TokenLoss with sums `clip_fraction` (clipped branch strictly larger), `clip_fraction_lower` (dual clip active), `approx_kl`
        (old - new), `ratio`, and maximum `ratio_max_deviation` (|ratio - 1|).
    Source: Schulman et al. 2017, eq. 7; Yu et al. 2025 (clip-higher); Ye et al. 2020, eq. 5 (dual clip).
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs, response_mask)
    ratio = safe_exp(log_ratio)
    advantages = select(advantages.detach(), response_mask)
    loss, is_clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    is_bounded = torch.zeros_like(response_mask)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_bounded = (advantages < 0) & (loss > bound + _rounding(bound))
        loss = torch.where(is_bounded, bound, loss)
    return _policy_terms(loss, log_ratio, ratio, response_mask, clip_fraction=is_clipped, clip_fraction_lower=is_bounded)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate loss whose ratio is the geometric mean of the sequence's token ratios: s = exp(mean(log new - log old)).

    Every token has the value of s and, in place of the mean's, its own log-probability's gradient: s * new / stop_gradient(new). With one
    advantage per sequence and tokens that weigh alike, the gradient of the sequence's mean is exactly that of s; with an advantage per
    token it is GSPO-token's.

    Args: as `ppo_loss`; usual bounds are far narrower (3e-4 and 4e-4), since s moves less than a token's ratio.
    Returns: TokenLoss with the metrics of `ppo_loss` (no dual clip); `clip_fraction`, `ratio` and `ratio_max_deviation` are those of s,
        counted at every trained token.
    Source: Zheng et al. 2025 (GSPO), eq. 5 to 7 and 14.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs, response_mask)
    of_sequence = sequence_log_ratio(log_ratio.detach(), response_mask)
    # new - stop_gradient(new) is 0 with gradient 1.
    ratio = safe_exp(of_sequence + (log_ratio - log_ratio.detach()))
    loss, is_clipped = _clipped_surrogate(ratio, select(advantages.detach(), response_mask), clip_low, clip_high)
    return _policy_terms(loss, log_ratio, ratio, response_mask, clip_fraction=is_clipped & response_mask)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """REINFORCE with a clipped importance weight: -stop_gradient(clip(ratio)) * advantage * log new. No token loses its gradient.

    Args: as `ppo_loss`; the weight is kept within [1 - clip_low, 1 + clip_high].
    Returns: TokenLoss with the metrics of `ppo_loss` (no dual clip); `clip_fraction` counts weights outside the bounds.
    Source: MiniMax 2025 (CISPO), eq. 4 and 5.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs, response_mask)
    ratio = safe_exp(log_ratio.detach())
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weights * select(advantages.detach(), response_mask) * select(logprobs, response_mask)
    return _policy_terms(loss, log_ratio, ratio, response_mask, clip_fraction=(weights != ratio) & response_mask)


def reinforce_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> TokenLoss:
    """Plain policy gradient: -advantage * log new. Right for data of the policy being trained; old_logprobs only enter metrics.

    Args: as `ppo_loss`.
    Returns: TokenLoss with `approx_kl`, `ratio` and `ratio_max_deviation` of `ppo_loss`.
    Source: Williams 1992, eq. 11.
    """
    log_ratio = log_ratio_of(logprobs, old_logprobs, response_mask)
    loss = -select(advantages.detach(), response_mask) * select(logprobs, response_mask)
    return _policy_terms(loss, log_ratio, safe_exp(log_ratio.detach()), response_mask)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    value_clip: float | None,
) -> TokenLoss:
    """Half the squared error, or the larger of it and that of the clipped value.

    Args:
        values: [B, T] of the critic being trained.
        old_values: [B, T] when the advantages were computed; no gradient.
        returns: [B, T] targets; no gradient.
        response_mask: [B, T] bool.
        value_clip: largest change of a value that counts; None is off.
    Returns: TokenLoss with sums `value_clip_fraction` (clipped error strictly larger), `value` and `return`.
    Source: Schulman et al. 2017 (reference implementation), 0.5 * max((v - R)^2, (clip(v) - R)^2).
    """
    values = select(values, response_mask)
    returns = select(returns.detach(), response_mask)
    loss = 0.5 * (values - returns).square()
    is_clipped = torch.zeros_like(response_mask)
    if value_clip is not None:
        old_values = select(old_values.detach(), response_mask)
        bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped = 0.5 * (bounded - returns).square()
        # Inside the range the two differ by rounding only; that is no clipping.
        is_clipped = (clipped > loss) & ((values - old_values).abs() > value_clip)
        loss = torch.where(is_clipped, clipped, loss)
    sums = {"value_clip_fraction": _count(is_clipped), "value": values.detach().double().sum(), "return": returns.double().sum()}
    return TokenLoss(per_token=select(loss, response_mask), sums=sums)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The larger of -advantage * ratio and the same with the bounded ratio, and where that is the bounded one (not on the border)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = clipped - _rounding(clipped) > plain
    return torch.where(is_clipped, clipped, plain), is_clipped


def _rounding(x: Tensor) -> Tensor:
    """What the exponential of a rounded log-ratio may be off by: without it, chance would decide whether a ratio on a bound is clipped."""
    return 4 * torch.finfo(x.dtype).eps * x.detach().abs()


def _policy_terms(loss: Tensor, log_ratio: Tensor, ratio: Tensor, response_mask: Tensor, **counted: Tensor) -> TokenLoss:
    ratio = ratio.detach()
    sums = {"approx_kl": -log_ratio.detach().double().sum(), "ratio": select(ratio, response_mask).double().sum()}
    return TokenLoss(
        per_token=select(loss, response_mask),
        sums=sums | {name: _count(chosen) for name, chosen in counted.items()},
        maxima={"ratio_max_deviation": _largest((ratio - 1.0).abs(), response_mask)},
    )


def _count(chosen: Tensor) -> Tensor:
    return chosen.sum().double()


def _largest(x: Tensor, mask: Tensor) -> Tensor:
    return select(x, mask).max().double() if x.numel() else x.new_zeros(()).double()
