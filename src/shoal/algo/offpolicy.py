"""Weights that correct for the engine sampling from slightly other probabilities than the trainer's.

Legend: B sequences, T response tokens. Weights multiply per-token losses and carry no gradient; denominators stay the trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.algo.losses import log_ratio_of
from shoal.algo.masking import select


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, cap: float) -> Tensor:
    """min(exp(old - rollout), cap) per token.

    Args:
        old_logprobs: [B, T] recomputed by the trainer with the weights that sampled.
        rollout_logprobs: [B, T] as reported by the engine.
        response_mask: [B, T] bool.
        cap: largest weight.
    Returns: [B, T], 0 where masked.
    Source: Espeholt et al. 2018 (truncated importance weights); Yao et al. 2025 for engine mismatch.
    """
    ratio = log_ratio_of(old_logprobs.detach(), rollout_logprobs, response_mask).exp()
    return select(ratio.clamp(max=cap), response_mask)


def masked_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, low: float, high: float) -> Tensor:
    """exp(old - rollout) per token where it lies in [low, high], else 0.

    Args: as `truncated_weights`, with both bounds.
    Returns: [B, T], 0 where masked or dropped.
    Source: IcePop (Ling team 2025).
    """
    ratio = log_ratio_of(old_logprobs.detach(), rollout_logprobs, response_mask).exp()
    return torch.where(response_mask & (ratio >= low) & (ratio <= high), ratio, 0.0)
