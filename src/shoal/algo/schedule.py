"""Learning rate as a pure function of the number of optimizer updates already made, so that resuming needs no state of its own."""

from __future__ import annotations


def learning_rate(num_updates: int, *, lr: float, warmup_steps: int = 0, total_steps: int | None = None) -> float:
    """Return the rate of the next update: linear warm-up, then constant, or linear decay to 0 at total_steps.

    Args:
        num_updates: optimizer updates already made; skipped ones do not count.
        lr: peak rate.
        warmup_steps: updates of warm-up; the first one then has rate 0.
        total_steps: updates after which the rate is 0; None stays at the peak.
    Raises: ValueError: negative num_updates.
    """
    if num_updates < 0:
        raise ValueError(f"num_updates is {num_updates}; it counts updates made and starts at 0")
    if num_updates < warmup_steps:
        return lr * num_updates / warmup_steps
    if total_steps is None:
        return lr
    return lr * max(0, total_steps - num_updates) / max(1, total_steps - warmup_steps)
