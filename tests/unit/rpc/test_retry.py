"""Retry of idempotent calls, with a scripted random source and virtual sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shoal.errors import DeadlineError, InvalidRequestError, ShoalError, UnavailableError
from shoal.rpc import retry
from shoal.rpc.retry import BASE_DELAY_S, MAX_ATTEMPTS, MAX_DELAY_S, backoff_s, call_idempotent


class _Clock:
    """Time that moves only by sleeping or by `spend`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(retry, "asyncio", SimpleNamespace(sleep=clock.sleep))
    return clock


class _Script:
    """Raises each error in turn, then answers; notes the time that it was given."""

    def __init__(self, *errors: ShoalError, before: Callable[[], None] = lambda: None) -> None:
        self.errors = list(errors)
        self.left_s: list[float] = []
        self.before = before

    async def __call__(self, left_s: float) -> str:
        self.left_s.append(left_s)
        self.before()
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_retry_answers_after_unavailable(clock: _Clock) -> None:
    script = _Script(UnavailableError("a"), UnavailableError("b"))
    assert await call_idempotent(script, 10.0, random_unit=lambda: 0.5) == "answer"
    assert clock.slept_s == pytest.approx([0.5 * BASE_DELAY_S, 0.5 * 2 * BASE_DELAY_S])
    assert script.left_s == pytest.approx([10.0, 10.0 - 0.05, 10.0 - 0.15])


@pytest.mark.parametrize("error", [InvalidRequestError("x"), DeadlineError("x")])
async def test_retry_other_errors_pass_at_once(clock: _Clock, error: ShoalError) -> None:
    script = _Script(error, UnavailableError("not reached"))
    with pytest.raises(type(error)):
        await call_idempotent(script, 10.0)
    assert len(script.left_s) == 1


async def test_retry_stops_after_the_attempts(clock: _Clock) -> None:
    script = _Script(*[UnavailableError(str(i)) for i in range(100)])
    with pytest.raises(UnavailableError, match=str(MAX_ATTEMPTS - 1)):
        await call_idempotent(script, 1e9, random_unit=lambda: 1.0)
    assert len(script.left_s) == MAX_ATTEMPTS


async def test_retry_never_sleeps_past_the_deadline(clock: _Clock) -> None:
    script = _Script(*[UnavailableError(str(i)) for i in range(100)], before=lambda: clock.spend(0.3))
    with pytest.raises(UnavailableError):
        await call_idempotent(script, 1.0, max_attempts=100, random_unit=lambda: 1.0)
    assert clock.now_s <= 100.0 + 1.0 + 0.3
    assert all(left_s > 0 for left_s in script.left_s)


async def test_retry_is_cancellable_while_it_waits() -> None:
    started = asyncio.Event()

    async def fail(left_s: float) -> None:
        started.set()
        raise UnavailableError("down")

    task = asyncio.create_task(call_idempotent(fail, 1000.0, random_unit=lambda: 1.0))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_backoff_doubles_up_to_its_cap() -> None:
    assert [backoff_s(attempt) for attempt in (1, 2, 3)] == pytest.approx([0.1, 0.2, 0.4])
    assert backoff_s(50) == backoff_s(10_000) == MAX_DELAY_S
