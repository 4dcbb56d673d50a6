"""Durations of overlapping stages, against hand-computed values."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from shoal_coordinator.stage_clock import Stage, StageClock


class FakeClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_stage_clock_counts_overlap_once() -> None:
    now = FakeClock()
    clock = StageClock(now_s=now)
    clock.start_step()
    first, second = ExitStack(), ExitStack()
    first.enter_context(clock.measure(Stage.ROLLOUT))
    now.now_s = 1.0
    second.enter_context(clock.measure(Stage.ROLLOUT))
    now.now_s = 3.0
    first.close()
    now.now_s = 4.0
    second.close()
    now.now_s = 5.0
    assert clock.read().stages[Stage.ROLLOUT] == 4.0


def test_stage_clock_control_is_the_time_with_neither_generation_nor_training() -> None:
    now = FakeClock()
    clock = StageClock(now_s=now)
    clock.start_step()
    for stage, seconds in [(Stage.ROLLOUT, 4.0), (Stage.REWARD, 1.0), (Stage.FORWARD, 2.0), (Stage.ADVANTAGES, 0.5), (Stage.UPDATE, 2.0)]:
        with clock.measure(stage):
            now.now_s += seconds
    with clock.measure(Stage.PUSH), clock.measure(Stage.UPDATE):
        now.now_s += 0.25
    with clock.measure(Stage.PUSH):
        now.now_s += 0.25
    times = clock.read()
    assert times.step_s == 10.0
    assert times.stages[Stage.PUSH] == 0.5
    assert times.stages[Stage.UPDATE] == 2.25
    assert times.control_s == pytest.approx(1.75)
    assert times.as_metrics()["control_share"] == pytest.approx(0.175)


def test_stage_clock_starts_again() -> None:
    now = FakeClock()
    clock = StageClock(now_s=now)
    with clock.measure(Stage.ROLLOUT):
        now.now_s = 5.0
        clock.start_step()
        now.now_s = 7.0
    assert clock.read().stages[Stage.ROLLOUT] == 2.0


def test_stage_clock_closes_a_stage_that_raises() -> None:
    now = FakeClock()
    clock = StageClock(now_s=now)
    with pytest.raises(RuntimeError), clock.measure(Stage.PUSH):
        raise RuntimeError
    now.now_s = 3.0
    assert clock.read().stages[Stage.PUSH] == 0.0
