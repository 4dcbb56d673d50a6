"""Weights that correct for the engine sampling from slightly other probabilities than the trainer's.

Legend: B sequences, T response tokens. The ratio is trainer / engine, exp(old - rollout). Weights and kept multiply per-token losses and
carry no gradient; denominators stay the trained tokens. Everything is computed in float64 from selected tokens: a sum of log-ratios of a
long response may leave the range of float32, and its exponential then is 0 or inf, which the bounds turn into a finite weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.algo.lookup import lookup
from shoal.algo.masking import select


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    importance_weights: str,
    importance_low: float,
    importance_high: float,
) -> Tensor:
    """Weight of each token's loss for the mismatch of engine and trainer.

    Args:
        old_logprobs: [B, T] recomputed by the trainer with the weights that sampled.
        rollout_logprobs: [B, T] as reported by the engine.
        response_mask: [B, T] bool.
        importance_weights: `none` (1), `token_truncate` (min(ratio, importance_high)), `token_mask` (ratio where it lies in
            [importance_low, importance_high], else 0), `sequence_truncate` and `sequence_mask` (the same for the product of the
            response's ratios, at each of its tokens).
        importance_low, importance_high: bounds of the ratio.
    Returns: [B, T], dtype of old_logprobs, 0 where masked, no gradient.
    Raises: ConfigError: unknown importance_weights.
    Source: token_truncate Espeholt et al. 2018 and Yao et al. 2025; token_mask Ling team 2025 (IcePop).
    """
    mode = lookup(IMPORTANCE_WEIGHTS, "importance_weights", importance_weights)
    weights = mode(_log_ratio(old_logprobs, rollout_logprobs, response_mask), importance_low, importance_high)
    return select(weights.expand(response_mask.shape), response_mask).to(old_logprobs.dtype)


def kept_sequences(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    rejection: str,
    rejection_low: float,
    rejection_high: float,
) -> Tensor:
    """Whether each response is near enough to the trainer's policy to be trained.

    Args:
        old_logprobs, rollout_logprobs, response_mask: as `importance_weights`.
        rejection: `none` (all are kept), `sequence` (the product of the token ratios lies within the bounds), `geometric` (their
            geometric mean does).
        rejection_low, rejection_high: bounds, inclusive.
    Returns: [B] bool; True for a response without a trained token.
    Raises: ConfigError: unknown rejection.
    Source: Liu et al. 2025 ("When speed kills stability"), sequence and geometric rejection.
    """
    test = lookup(REJECTIONS, "rejection", rejection)
    statistic = test(_log_ratio(old_logprobs, rollout_logprobs, response_mask), response_mask)
    if statistic is None:
        return torch.ones_like(response_mask.any(dim=1))
    ratio = statistic.exp()
    return ((ratio >= rejection_low) & (ratio <= rejection_high)) | ~response_mask.any(dim=1)


def correction_sums(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    kept: Tensor,
    *,
    importance_weights: str,
    importance_high: float,
) -> dict[str, Tensor]:
    """Count what the correction changed, in trained tokens; add over micro-batches and ranks, divide by the number of trained tokens.

    Args:
        old_logprobs, rollout_logprobs, response_mask: as `importance_weights`.
        weights, kept: what `importance_weights` and `kept_sequences` returned.
        importance_weights, importance_high: as `importance_weights`.
    Returns: float64 scalars `importance_capped_fraction` (a truncating mode lowered the weight), `importance_dropped_fraction` (a masking
        mode set it to 0) and `rejected_fraction` (the token's response is not kept).
    """
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, response_mask)
    if importance_weights.startswith("sequence"):
        log_ratio = _of_sequence(log_ratio)
    nothing = torch.zeros_like(response_mask)
    capped = log_ratio.exp() > importance_high if importance_weights.endswith("truncate") else nothing
    dropped = weights == 0 if importance_weights.endswith("mask") else nothing
    return {
        "importance_capped_fraction": (response_mask & capped).sum().double(),
        "importance_dropped_fraction": (response_mask & dropped).sum().double(),
        "rejected_fraction": (response_mask & ~kept[:, None]).sum().double(),
    }


def _log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """log(trainer / engine), [B, T] float64, 0 where masked, no gradient."""
    return select(old_logprobs.detach().double(), response_mask) - select(rollout_logprobs.detach().double(), response_mask)


def _of_sequence(log_ratio: Tensor) -> Tensor:
    return log_ratio.sum(dim=1, keepdim=True)


def _one(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.ones_like(log_ratio)


def _truncate(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return log_ratio.exp().clamp(max=high)


def _mask(log_ratio: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


IMPORTANCE_WEIGHTS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": _one,
    "token_truncate": _truncate,
    "token_mask": _mask,
    "sequence_truncate": lambda log_ratio, low, high: _truncate(_of_sequence(log_ratio), low, high),
    "sequence_mask": lambda log_ratio, low, high: _mask(_of_sequence(log_ratio), low, high),
}
"""([B, T] log-ratios, low, high) -> weights, [B, T] or [B, 1]."""


def _nothing(log_ratio: Tensor, response_mask: Tensor) -> None:
    return None


def _product(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    return log_ratio.sum(dim=1)


def _geometric_mean(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    return log_ratio.sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)


REJECTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "none": _nothing,
    "sequence": _product,
    "geometric": _geometric_mean,
}
"""([B, T] log-ratios, [B, T] mask) -> [B] logarithm of the ratio that is held against the bounds; None rejects nothing."""
