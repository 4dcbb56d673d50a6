"""Where the time of a step goes.

A stage may be open several times at once (many Generate calls); its duration is the time during which at least one is
open. `control_s` is the part of the step during which neither a Generate call nor a trainer forward or update call is
open: it holds scoring that nothing overlaps, the queue, batching, advantages, the push, and the coordinator itself.
Time is monotonic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """A measured part of a step."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    QUEUE = "queue"
    FORWARD = "forward"
    ADVANTAGES = "advantages"
    UPDATE = "update"
    PUSH = "push"


BUSY_STAGES = frozenset({Stage.ROLLOUT, Stage.FORWARD, Stage.UPDATE})
"""Generating or training; the rest of a step is control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Durations of one step in seconds."""

    step_s: float
    stages: dict[Stage, float]
    busy_s: float

    @property
    def control_s(self) -> float:
        """Time with no open Generate, forward or update call."""
        return max(0.0, self.step_s - self.busy_s)

    @property
    def control_share(self) -> float:
        """control_s as a part of step_s."""
        return self.control_s / self.step_s if self.step_s > 0 else 0.0

    def as_metrics(self) -> dict[str, float]:
        """`<stage>_s` for every stage, step_s, control_s and control_share."""
        times = {f"{stage}_s": self.stages.get(stage, 0.0) for stage in Stage}
        return times | {"step_s": self.step_s, "control_s": self.control_s, "control_share": self.control_share}


class _Timer:
    """Time during which a counter is above zero."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._total = 0.0

    def enter(self, now: float) -> None:
        """One more block is open."""
        if self._open == 0:
            self._since = now
        self._open += 1

    def leave(self, now: float) -> None:
        """One block fewer is open; time counts while any is."""
        self._open -= 1
        if self._open == 0:
            self._total += now - self._since

    def total(self, now: float) -> float:
        """Seconds with a block open, up to now."""
        return self._total + (now - self._since if self._open else 0.0)

    def restart(self, now: float) -> None:
        """Count from now; blocks stay open."""
        self._total, self._since = 0.0, now


class StageClock:
    """Measures stages of the current step; used from the event loop alone."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._started = now_s()
        self._timers = {stage: _Timer() for stage in Stage}
        self._busy = _Timer()

    def start_step(self) -> None:
        """Begin a new step; stages that are still open (one step runs into the next) are counted from now."""
        self._started = self._now_s()
        for timer in (*self._timers.values(), self._busy):
            timer.restart(self._started)

    @contextmanager
    def measure(self, stage: Stage) -> Iterator[None]:
        """Count the time inside the block for stage; blocks may overlap."""
        timers = (self._timers[stage], self._busy) if stage in BUSY_STAGES else (self._timers[stage],)
        now = self._now_s()
        for timer in timers:
            timer.enter(now)
        try:
            yield
        finally:
            now = self._now_s()
            for timer in timers:
                timer.leave(now)

    def read(self) -> StepTimes:
        """Times since start_step."""
        now = self._now_s()
        stages = {stage: timer.total(now) for stage, timer in self._timers.items()}
        return StepTimes(step_s=now - self._started, stages=stages, busy_s=self._busy.total(now))
