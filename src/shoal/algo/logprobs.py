"""Log-probabilities and entropies of sampled tokens without the [N, V] logits of a whole batch.

Legend: N token positions, H hidden size, V vocabulary rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Apply: TypeAlias = Callable[[Tensor, Tensor, Tensor, float, int, bool, int], tuple[Tensor, Tensor]]

CHUNK_ELEMENTS = 1 << 22
"""Logits held at once: 16 MiB in float32."""


def logits_to_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature).

    Args:
        logits: [..., V].
        token_ids: [...] int64.
        temperature: divides the logits, before the softmax.
    Returns: [...].
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, token_ids[..., None])[..., 0]


def logits_to_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats; entries of probability 0 (logit -inf) give value and gradient 0.

    Args:
        logits: [..., V].
    Returns: [...].
    """
    return _entropy(torch.log_softmax(logits / temperature, dim=-1))


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each sampled token, and the entropy at its position, in chunks of positions.

    Equals `logits_to_logprobs` and `logits_to_entropy` of hidden @ head_weight.T, in value and gradient. Pass trained positions only: what
    is not passed in cannot leak NaN. If all logits fit one chunk the backward keeps them, else it computes each chunk again.

    Args:
        hidden: [N, H] final hidden state of the position before each token.
        head_weight: [V, H] output embedding; may be the (tied) input embedding.
        token_ids: [N] int64.
        temperature: divides the logits.
        vocab_size: rows of head_weight that can be sampled (a padded vocabulary has more); None is all.
        with_entropy: False skips the entropies (zeros are returned).
        chunk_elements: logits held at once.
    Returns: logprobs, entropies: each [N], float32 or wider.
    Raises: ValueError: shapes do not fit, or temperature is not positive.
    """
    if hidden.ndim != 2 or hidden.shape[1] != head_weight.shape[1] or token_ids.shape != hidden.shape[:1]:
        shapes = f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)}, token_ids {tuple(token_ids.shape)}"
        raise ValueError(f"shapes do not fit [N, H], [V, H], [N]: {shapes}")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities for training need a positive one")
    size = head_weight.shape[0] if vocab_size is None else vocab_size
    if not 0 < size <= head_weight.shape[0]:
        raise ValueError(f"vocab_size is {size}; the head has {head_weight.shape[0]} rows")
    chunk = max(1, chunk_elements // size)
    apply: _Apply = _ChunkedLogprobs.apply  # torch leaves it untyped
    return apply(hidden, head_weight, token_ids, temperature, size, with_entropy, chunk)


def _log_softmax(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    """[n, V] log-probabilities of a chunk: logits in the model's dtype, softmax in float32 or wider, as the engine computes them."""
    logits = hidden @ head_weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _entropy(logprobs: Tensor) -> Tensor:
    probs = logprobs.exp()
    return -(probs * torch.where(probs > 0, logprobs, 0.0)).sum(dim=-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward over chunks of positions; backward from the closed-form gradient of each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch names no public type
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        weight = head_weight[:vocab_size]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        picked = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        entropies = torch.zeros_like(picked)
        kept: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logprobs = _log_softmax(hidden[rows], weight, temperature)
            picked[rows] = logprobs.gather(1, token_ids[rows, None])[:, 0]
            if with_entropy:
                entropies[rows] = _entropy(logprobs)
            kept = logprobs if hidden.shape[0] <= chunk else None
        ctx.save_for_backward(hidden, head_weight, token_ids, entropies, kept)
        ctx.settings = (temperature, vocab_size, with_entropy, chunk)
        # A loss without an entropy bonus then skips the entropy's gradient.
        ctx.set_materialize_grads(False)
        return picked, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch names no public type
        hidden, head_weight, token_ids, entropies, kept = ctx.saved_tensors
        temperature, vocab_size, with_entropy, chunk = ctx.settings
        grad_picked = torch.zeros_like(entropies) if grads[0] is None else grads[0]
        grad_entropies = grads[1] if with_entropy else None
        weight = head_weight[:vocab_size]
        grad_hidden = torch.zeros_like(hidden)
        # float32 sum over chunks: a bfloat16 one would lose small contributions.
        grad_weight = torch.zeros(head_weight.shape, dtype=grad_picked.dtype, device=head_weight.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logprobs = _log_softmax(hidden[rows], weight, temperature) if kept is None else kept
            entropy_part = None if grad_entropies is None else (entropies[rows], grad_entropies[rows])
            grad_logits = _grad_logits(logprobs, token_ids[rows], grad_picked[rows], entropy_part, temperature).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight[:vocab_size] += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(head_weight.dtype), None, None, None, None, None


def _grad_logits(
    logprobs: Tensor,
    token_ids: Tensor,
    grad_picked: Tensor,
    entropy_part: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> Tensor:
    """[n, V] gradient: g * (onehot - p) - g_entropy * p * (log p + entropy), divided by the temperature."""
    probs = logprobs.exp()
    grad = -probs * grad_picked[:, None]
    grad.scatter_add_(1, token_ids[:, None], grad_picked[:, None])
    if entropy_part is not None:
        entropies, grad_entropies = entropy_part
        # An entry of probability 0 has log-probability -inf, and 0 * inf would be NaN.
        finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
        grad -= grad_entropies[:, None] * probs * (finite + entropies[:, None])
    return grad if temperature == 1.0 else grad / temperature
