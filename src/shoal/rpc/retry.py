"""The one retry: idempotent calls on UnavailableError, with full jitter, inside the caller's deadline.

Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (full jitter).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shoal.errors import UnavailableError

BASE_DELAY_S = 0.1
MAX_DELAY_S = 2.0
# A dead peer is reported after about three seconds even where the deadline is minutes.
MAX_ATTEMPTS = 6

_Answer = TypeVar("_Answer")


async def call_idempotent(
    call: Callable[[float], Awaitable[_Answer]],
    timeout_s: float,
    *,
    max_attempts: int = MAX_ATTEMPTS,
    random_unit: Callable[[], float] = random.random,
) -> _Answer:
    """Run a call, again after UnavailableError.

    Args:
        call: Gets the seconds that are left of the deadline. It must not retry by itself.
        timeout_s: Deadline of everything together, in seconds.
        max_attempts: Calls at most, the first included.
        random_unit: Uniform in [0, 1).
    Raises: UnavailableError: the last one, once the attempts or the time are used up. Other errors at once.
    """
    deadline_s = time.monotonic() + timeout_s
    attempt = 0
    while True:
        attempt += 1
        try:
            return await call(max(deadline_s - time.monotonic(), 0.0))
        except UnavailableError:
            delay_s = jittered_delay_s(attempt, random_unit)
            if attempt >= max_attempts or time.monotonic() + delay_s >= deadline_s:
                raise
            await asyncio.sleep(delay_s)


def jittered_delay_s(attempt: int, random_unit: Callable[[], float] = random.random) -> float:
    """Choose the wait after this attempt (from 1), in seconds: anything up to the longest."""
    return random_unit() * backoff_s(attempt)


def backoff_s(attempt: int) -> float:
    """Return the longest wait after this attempt (from 1), in seconds."""
    return min(MAX_DELAY_S, BASE_DELAY_S * 2.0 ** min(attempt - 1, 30))
