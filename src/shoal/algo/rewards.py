"""Per-token rewards from scores and the KL penalty.

Legend: B sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algo.kl import token_kl
from shoal.algo.masking import SumOverRanks, masked_moments, one_rank, select, whiten
from shoal.errors import ConfigError


def response_mask_of(response_lengths: Tensor, num_tokens: int) -> Tensor:
    """Mask the padding by reported length, never by pad id (pad may equal EOS).

    Args:
        response_lengths: [B] integer.
        num_tokens: T.
    Returns: [B, T] bool.
    """
    return torch.arange(num_tokens, device=response_lengths.device) < response_lengths[:, None]


def outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Place each score on the last trained token of its sequence.

    Args:
        scores: [B] outcome reward.
        response_mask: [B, T] bool, from reported lengths.
    Returns: [B, T], 0 elsewhere; a row without a trained token gets nothing, whatever its score is.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=1, keepdim=True)
    return select(scores[:, None].expand(response_mask.shape), positions == last)


def penalised_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """Outcome reward on the last trained token minus kl_coef times the KL of every token; carries no gradient.

    Args:
        scores: [B] outcome reward.
        logprobs: [B, T] of the policy that is about to be updated.
        ref_logprobs: [B, T] of the reference.
        response_mask: [B, T] bool.
        kl_coef: weight of the penalty.
        kl_estimator: name in `shoal.algo.kl.KL_ESTIMATORS`.
    Returns: rewards, kl: each [B, T], 0 where masked.
    Raises: ConfigError: unknown estimator.
    Source: Ziegler et al. 2019, eq. 2.
    """
    kl = token_kl(logprobs.detach(), ref_logprobs.detach(), response_mask, kl_estimator=kl_estimator)
    return outcome_rewards(scores.to(kl.dtype), response_mask) - kl_coef * kl, kl


def shaped_scores(
    scores: Tensor,
    response_lengths: Tensor,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    clip: tuple[float, float] | None,
    normalise: str,
    overlong_buffer_tokens: int,
    overlong_penalty: float,
    max_new_tokens: int,
) -> Tensor:
    """Bound the scorer's reward, then subtract the penalty of a long answer, then normalise over the scored responses of all ranks.

    Args:
        scores: [B] outcome reward; NaN is not scored, and stays NaN.
        response_lengths: [B] tokens.
        sum_over_ranks: adds float64 vectors over ranks; used for `batch` only, and then on every rank.
        clip: bounds of the scorer's reward; None is off.
        normalise: `none`, or `batch`: (score - mean) / sqrt(population variance + 1e-8), 0 when all are equal.
        overlong_buffer_tokens: tokens before max_new_tokens over which the penalty grows; 0 is off.
        overlong_penalty: what a response of full length loses.
        max_new_tokens: full length.
    Returns: [B], dtype of scores.
    Raises: ConfigError: unknown normalise.
    Source: overlong penalty Yu et al. 2025 (DAPO), eq. 13.
    """
    if normalise not in ("none", "batch"):
        raise ConfigError(f"reward.normalise is {normalise!r}; use one of batch, none")
    scored = ~scores.isnan()
    shaped = select(scores.detach(), scored).double()
    if clip is not None:
        shaped = shaped.clamp(*clip)
    if overlong_buffer_tokens > 0:
        shaped = shaped + overlong_penalty * _overlong(response_lengths, max_length=max_new_tokens, buffer=overlong_buffer_tokens)
    if normalise == "batch":
        shaped = whiten(shaped, scored, masked_moments(shaped, scored, sum_over_ranks))
    return torch.where(scored, shaped, torch.nan).to(scores.dtype)


def overlong_penalty(response_lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Penalise long answers linearly over the last `buffer` tokens before max_length.

    Args:
        response_lengths: [B] tokens.
        max_length: length at which the penalty is -1.
        buffer: tokens over which it grows from 0.
    Returns: [B] float64 in [-1, 0].
    Raises: ValueError: buffer is not positive.
    Source: Yu et al. 2025 (DAPO), eq. 13.
    """
    if buffer <= 0:
        raise ValueError(f"buffer is {buffer}; give the number of tokens over which the penalty grows")
    start = max_length - buffer
    return -((response_lengths.double() - start) / buffer).clamp(0.0, 1.0)


_overlong = overlong_penalty  # `shaped_scores` has a setting of that name
