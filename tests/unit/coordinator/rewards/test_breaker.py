"""When a failing server rests, and how it shows that it works again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from shoal_coordinator.rewards.breaker import MAX_BREAKERS, MAX_FAILURES, Breakers

KEY = ("a", "sum@1")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened() -> tuple[Breakers, Clock]:
    clock = Clock()
    breakers = Breakers(clock)
    for _ in range(MAX_FAILURES):
        assert breakers.allows(KEY)
        breakers.fail(KEY, is_probe=breakers.begin(KEY))
    return breakers, clock


def test_breaker_opens_after_five_failures_in_a_row_for_a_second() -> None:
    breakers, clock = opened()
    assert not breakers.allows(KEY)
    clock.now_s = 0.99
    assert not breakers.allows(KEY)
    clock.now_s = 1.0
    assert breakers.allows(KEY)


def test_success_between_failures_keeps_it_closed() -> None:
    breakers = Breakers(Clock())
    for number in range(20):
        breakers.begin(KEY)
        if number % MAX_FAILURES == MAX_FAILURES - 1:
            breakers.succeed(KEY)
        else:
            breakers.fail(KEY, is_probe=False)
    assert breakers.allows(KEY)


def test_one_call_probes_and_the_others_wait_for_it() -> None:
    breakers, clock = opened()
    clock.now_s = 1.0
    assert breakers.begin(KEY)
    assert not breakers.allows(KEY)
    breakers.succeed(KEY)
    assert breakers.allows(KEY)
    assert not breakers.begin(KEY)


def test_rest_doubles_with_each_failed_probe_up_to_thirty_seconds() -> None:
    breakers, clock = opened()
    clock.now_s = 1.0
    rests = []
    for _ in range(7):
        began_s = clock.now_s
        breakers.fail(KEY, is_probe=breakers.begin(KEY))
        while not breakers.allows(KEY):
            clock.now_s += 0.5
        rests.append(clock.now_s - began_s)
    assert rests == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_calls_that_were_under_way_when_it_opened_do_not_prolong_the_rest() -> None:
    breakers, clock = opened()
    for _ in range(60):
        breakers.fail(KEY, is_probe=False)
    clock.now_s = 1.0
    assert breakers.allows(KEY)


def test_probe_that_was_cancelled_leaves_the_next_call_to_probe() -> None:
    breakers, clock = opened()
    clock.now_s = 1.0
    breakers.abandon(KEY, is_probe=breakers.begin(KEY))
    assert breakers.allows(KEY)
    assert breakers.begin(KEY)


@pytest.mark.parametrize("other", [("b", "sum@1"), ("a", "sum@2")])
def test_breakers_of_other_servers_and_scorers_stay_closed(other: tuple[str, str]) -> None:
    breakers, _ = opened()
    assert breakers.allows(other)


def test_breakers_of_servers_long_gone_are_forgotten() -> None:
    breakers = Breakers(Clock())
    for number in range(2 * MAX_BREAKERS):
        breakers.fail((f"server-{number}", "sum@1"), is_probe=False)
    assert len(breakers._breakers) == MAX_BREAKERS
