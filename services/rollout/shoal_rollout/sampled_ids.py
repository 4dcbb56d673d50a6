"""Keeps an engine from sampling the padding of its model's vocabulary: ids that no tokenizer knows."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def restrict_logits(model: nn.Module, num_sampled: int) -> None:
    """Make ids from `num_sampled` on impossible, before temperature and softmax: for greedy choice, sampling and log-probabilities alike.

    The model's last word on its logits is masked, after soft caps and scales, so any kind of head is covered, and a swap or reload of
    weights changes nothing. The logits keep their width: the engine may index them with any id of a prompt or stop list.

    Args:
        num_sampled: n of the ids [0, n) that can be sampled.
    """
    compute: Any = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM is not type-checked here
        logits = compute(*args, **kwargs)
        # Workers that do not sample have no logits.
        if logits is not None:
            logits[..., num_sampled:] = -math.inf
        return logits

    model.compute_logits = compute_logits  # type: ignore[assignment]  # modules declare tensors and modules alone
