"""A page of memory that a grader shares with the service: what it works on, since when, and what it need not start.

The grader writes it and goes on; the service reads it whenever it likes. So limits hold although user code may keep the interpreter's
lock for ever, and the service knows which sample a dead grader was at.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

_NUM_BYTES = mmap.PAGESIZE
_SEQUENCE, _SINCE_NS, _PHASE, _SKIP_BELOW = range(4)


class Phase(IntEnum):
    """What a grader does with a request."""

    PREPARING = 1
    SCORING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The request that a grader is at, what it does with it, and for how long."""

    sequence: int
    phase: Phase
    elapsed_s: float


class ProgressPage:
    """Both ends' view of the page. Every word has one writer."""

    def __init__(self, descriptor: int) -> None:
        """Map the page; the caller keeps its descriptor."""
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, _NUM_BYTES)).cast("Q")

    @classmethod
    def create(cls) -> Self:
        """Make a page of zeros in memory; `close` gives its descriptor back."""
        descriptor = os.memfd_create("shoal-grader", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _NUM_BYTES)
        return cls(descriptor)

    def close(self) -> None:
        """Close the descriptor; the page stays readable."""
        os.close(self.descriptor)

    def enter(self, phase: Phase, sequence: int) -> None:
        """Grader: say what it begins. The time is written first, so that no reader sees a new number with an old time."""
        self._words[_SINCE_NS] = time.monotonic_ns()
        self._words[_PHASE] = phase
        self._words[_SEQUENCE] = sequence

    def leave(self) -> None:
        """Grader: say that it works on nothing."""
        self._words[_SEQUENCE] = 0

    def detach(self) -> None:
        """Grader: go on with a copy, in a child that must not write for its parent."""
        self._words = memoryview(bytearray(self._words)).cast("Q")

    def is_taken_back(self, sequence: int) -> bool:
        """Grader: whether another grader does this request."""
        return sequence < self._words[_SKIP_BELOW]

    def read(self) -> Progress | None:
        """Service: what the grader is at; None if nothing."""
        sequence = self._words[_SEQUENCE]
        if sequence == 0:
            return None
        elapsed_s = (time.monotonic_ns() - self._words[_SINCE_NS]) / 1e9
        return Progress(sequence=sequence, phase=Phase(self._words[_PHASE]), elapsed_s=elapsed_s)

    def take_back_below(self, sequence: int) -> None:
        """Service: tell the grader not to start requests below this number."""
        self._words[_SKIP_BELOW] = sequence
