"""Per-token losses: one pure function each, listed in `shoal.algo.registry`.

Legend: B sequences, T response tokens. A loss returns [B, T] terms; `shoal.algo.aggregation` makes them one number. Keyword-only settings
carry the names of configuration fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.algo.masking import select

MAX_LOG_RATIO = 20.0
"""A log-ratio is bounded to this size: an overflow of its exponential, even in a branch that is not chosen, makes gradients NaN."""


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
    """Bounded log(new / old), [B, T], 0 where masked; see MAX_LOG_RATIO."""
    log_ratio = select(logprobs, response_mask) - select(old_logprobs.detach(), response_mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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
    advantages = select(advantages.detach(), response_mask)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = clipped > plain
    loss = torch.where(is_clipped, clipped, plain)
    is_bounded = torch.zeros_like(response_mask)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        is_bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
    return TokenLoss(
        per_token=select(loss, response_mask),
        sums=_ratio_sums(log_ratio, response_mask) | {"clip_fraction": _count(is_clipped), "clip_fraction_lower": _count(is_bounded)},
        maxima={"ratio_max_deviation": _largest((ratio.detach() - 1.0).abs(), response_mask)},
    )


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


def _ratio_sums(log_ratio: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach().double()
    return {"approx_kl": -log_ratio.sum(), "ratio": select(log_ratio.exp(), response_mask).sum()}


def _count(chosen: Tensor) -> Tensor:
    return chosen.sum().double()


def _largest(x: Tensor, mask: Tensor) -> Tensor:
    return select(x, mask).max().double() if x.numel() else x.new_zeros(()).double()
