"""Per-token estimators of KL(policy || reference).

Legend: B sequences, T response tokens. The sample comes from the policy. A new estimator is one function and one line in `KL_ESTIMATORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.algo.lookup import lookup
from shoal.algo.masking import select


def max_log_gap(dtype: torch.dtype) -> float:
    """Largest log-ratio that is exponentiated as it is: the square of its exponential is still finite (39.9 in float32)."""
    return 0.45 * math.log(torch.finfo(dtype).max)


def safe_exp(x: Tensor, max_x: float | None = None) -> Tensor:
    """exp(x), continued as a straight line above max_x so that value and gradient stay finite and keep their sign.

    The gradient of NaN is NaN, so that the update is skipped: a finite one would be applied, e^max_x in size.

    Args:
        x: any shape.
        max_x: where the line begins; None uses `max_log_gap` of the dtype.
    """
    limit = max_log_gap(x.dtype) if max_x is None else max_x
    # A product, not a sum: the derivative of clamp and relu at NaN is 0 or 1, and only the other factor makes it NaN.
    return torch.exp(x.clamp(max=limit)) * (1.0 + torch.relu(x - limit))


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, high variance, of either sign. Source: Schulman 2020, "Approximating KL divergence"."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased value, its gradient is that of the KL. Source: Schulman 2020."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - policy: unbiased and never negative. Finite at any gap, see `safe_exp`. Source: Schulman 2020."""
    gap = ref_logprobs - logprobs
    # expm1 near 0: exp(d) - 1 would lose all digits of a small gap.
    near = torch.expm1(gap.clamp(-1.0, 1.0))
    far = safe_exp(gap) - 1.0
    return torch.where(gap.abs() < 1.0, near, far) - gap


def k3_straight_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Value of k3, gradient of k2.

    Over samples of the policy being trained, the gradient of k3 is on average that of KL(reference || policy), the gradient of k2 that of
    KL(policy || reference), which is meant; the value of k3 is unbiased and never negative, that of k2 is biased.
    Source: Tang & Munos 2025, section 4; Schulman 2020 for the values.
    """
    gradient = k2(logprobs, ref_logprobs)
    return k3(logprobs, ref_logprobs).detach() + (gradient - gradient.detach())


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_straight_through": k3_straight_through,
}
"""(logprobs, ref_logprobs) -> KL per token; the inputs hold no masked garbage."""


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, *, kl_estimator: str = "k1") -> Tensor:
    """Estimate the KL to the reference for every token.

    Args:
        logprobs: [B, T] policy log-probabilities of the sampled tokens.
        ref_logprobs: [B, T] the same of the reference.
        response_mask: [B, T] bool.
        kl_estimator: name in `KL_ESTIMATORS`.
    Returns: [B, T], 0 where masked; differentiable.
    Raises: ConfigError: unknown estimator.
    """
    estimate = lookup(KL_ESTIMATORS, "kl_estimator", kl_estimator)
    return estimate(select(logprobs, response_mask), select(ref_logprobs, response_mask))
