"""Circuit breakers: a server that fails one scorer again and again gets none of its work for a while, then a single call to show itself.

    closed --5 failures in a row--> open for 1 s --> one probe call --success--> closed
                                      ^                   |
                                      +-- twice as long --+ failure (30 s at most)

Calls that were under way when it opened neither prolong nor end the rest by failing; a success ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_FAILURES = 5
FIRST_REST_S = 1.0
MAX_REST_S = 30.0
MAX_BREAKERS = 1024
"""Servers come and go under new ids; the oldest breakers are forgotten."""

Key = tuple[str, str]
"""Server, and scorer@version."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    rest_s: float = 0.0
    rests_until_s: float = 0.0
    is_probing: bool = False

    @property
    def is_open(self) -> bool:
        return self.rest_s > 0

    def open(self, rest_s: float, now_s: float) -> None:
        self.rest_s, self.rests_until_s, self.is_probing = rest_s, now_s + rest_s, False


class Breakers:
    """One breaker per server and scorer; used from the event loop alone."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._breakers: dict[Key, _Breaker] = {}

    def allows(self, key: Key) -> bool:
        """Whether a call may start now."""
        breaker = self._breakers.get(key)
        return breaker is None or not breaker.is_open or (not breaker.is_probing and self._now_s() >= breaker.rests_until_s)

    def begin(self, key: Key) -> bool:
        """A call starts, which `allows` has allowed; whether it is the probe of an open breaker."""
        breaker = self._breakers.get(key)
        if breaker is None or not breaker.is_open:
            return False
        breaker.is_probing = True
        return True

    def succeed(self, key: Key) -> None:
        """A call has succeeded."""
        self._breakers.pop(key, None)

    def fail(self, key: Key, *, is_probe: bool) -> None:
        """A call has failed by the server's fault."""
        breaker = self._breakers.setdefault(key, _Breaker())
        if is_probe:
            breaker.open(min(2 * breaker.rest_s, MAX_REST_S), self._now_s())
        elif not breaker.is_open:
            breaker.num_failures += 1
            if breaker.num_failures >= MAX_FAILURES:
                breaker.open(FIRST_REST_S, self._now_s())
        while len(self._breakers) > MAX_BREAKERS:
            del self._breakers[next(iter(self._breakers))]

    def abandon(self, key: Key, *, is_probe: bool) -> None:
        """A call has ended without saying anything about the server: it was cancelled, or refused for what it asked."""
        breaker = self._breakers.get(key)
        if is_probe and breaker is not None:
            breaker.is_probing = False
