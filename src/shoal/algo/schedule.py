"""Learning rate as a pure function of the number of optimizer updates already made, so that resuming needs no state of its own."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    num_updates: int,
    *,
    lr: float,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    schedule: Literal["constant", "linear", "cosine"] = "linear",
    min_share: float = 0.0,
) -> float:
    """Return the rate of the next update: linear warm-up, then constant, or a fall to lr x min_share at total_steps.

    With u = updates since the warm-up / (total_steps - warmup_steps), from 0 to 1, the fall is linear: lr (min_share + (1 - min_share)
    (1 - u)), or half a cosine: lr (min_share + (1 - min_share) (1 + cos(pi u)) / 2).

    Args:
        num_updates: optimizer updates already made; skipped ones do not count.
        lr: peak rate.
        warmup_steps: updates of warm-up; the first one then has rate 0.
        total_steps: updates after which the rate has fallen; None stays at the peak, as does `schedule` constant.
        schedule: how it falls.
        min_share: where it ends, as a part of the peak.
    Raises: ValueError: negative num_updates.
    Source: cosine: Loshchilov and Hutter 2017, eq. 5, without restarts.
    """
    if num_updates < 0:
        raise ValueError(f"num_updates is {num_updates}; it counts updates made and starts at 0")
    if num_updates < warmup_steps:
        return lr * num_updates / warmup_steps
    if total_steps is None or schedule == "constant":
        return lr
    rest = max(0, total_steps - num_updates) / max(1, total_steps - warmup_steps)
    remaining = rest if schedule == "linear" else (1 - math.cos(math.pi * rest)) / 2
    return lr * (min_share + (1 - min_share) * remaining)
