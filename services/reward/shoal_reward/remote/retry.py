"""When a failed request is tried again, and after what pause.

Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (full jitter).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


def is_retried(status: int) -> bool:
    """Whether an answer with this HTTP status is asked for again; the server refused any other, and would again."""
    return status == _TOO_MANY_REQUESTS or status >= _FIRST_SERVER_ERROR


def pause_s(
    num_tries: int,
    *,
    backoff_s: float,
    max_backoff_s: float,
    retry_after_s: float | None,
    random_unit: Callable[[], float] = random.random,
) -> float:
    """Choose the pause after a failed try, in seconds: full jitter, but no less than the server asked for.

    Args:
        num_tries: made so far, 1 or more.
        backoff_s, max_backoff_s: longest pause after the first try, and after any.
        retry_after_s: what the server asked for; None: nothing.
        random_unit: uniform in [0, 1).
    """
    longest = min(max_backoff_s, backoff_s * 2.0 ** min(num_tries - 1, 30))
    jittered = random_unit() * longest
    # Those that were all told the same second must not come back together.
    return jittered if retry_after_s is None else retry_after_s + jittered


def read_retry_after(value: str | None, now_unix_s: float | None = None) -> float | None:
    """Read a Retry-After header: seconds or a date; None where it is absent or neither.

    Args:
        value: of the header.
        now_unix_s: for dates; None: now.
    """
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    # A date with the zone -0000 has no zone; HTTP's dates are all UTC.
    at_s = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    return max(0.0, at_s - (time.time() if now_unix_s is None else now_unix_s))
