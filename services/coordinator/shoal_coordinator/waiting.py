"""Who waits for whom, and since when: what `shoal status` shows when a run seems to stand still."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

WaitsFor: TypeAlias = Sequence[str] | Callable[[], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """waiter waits for the named services to do `what`; the times are wall-clock seconds."""

    waiter: str
    waits_for: tuple[str, ...]
    what: str
    since_unix_s: float


class WaitBoard:
    """The open waits, oldest first; used from the event loop alone."""

    def __init__(self, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_unix_s = now_unix_s
        self._numbers = itertools.count()
        self._waits: dict[int, tuple[Wait, WaitsFor]] = {}

    @contextmanager
    def waiting(self, waiter: str, waits_for: WaitsFor, what: str) -> Iterator[None]:
        """List a wait while the block runs.

        Args:
            waiter: who waits.
            waits_for: service ids, or a function that tells the ids that are still waited for.
            what: what is waited for.
        """
        number = next(self._numbers)
        wait = Wait(waiter=waiter, waits_for=(), what=what, since_unix_s=self._now_unix_s())
        self._waits[number] = (wait, waits_for)
        try:
            yield
        finally:
            del self._waits[number]

    def current(self) -> tuple[Wait, ...]:
        """Open waits in the order in which they began."""
        return tuple(replace(wait, waits_for=_names(waits_for)) for wait, waits_for in self._waits.values())


def _names(waits_for: WaitsFor) -> tuple[str, ...]:
    return tuple(waits_for() if callable(waits_for) else waits_for)
