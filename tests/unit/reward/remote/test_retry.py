from __future__ import annotations

import pytest
from shoal_reward.remote.retry import is_retried, pause_s, read_retry_after


@pytest.mark.parametrize(
    ("status", "retried"), [(400, False), (404, False), (408, False), (422, False), (429, True), (500, True), (503, True)]
)
def test_only_overload_and_server_errors_are_retried(status: int, retried: bool) -> None:
    assert is_retried(status) is retried


def _pause(num_tries: int, unit: float, retry_after_s: float | None = None) -> float:
    return pause_s(num_tries, backoff_s=0.5, max_backoff_s=8.0, retry_after_s=retry_after_s, random_unit=lambda: unit)


def test_pauses_double_up_to_their_bound_and_are_spread_from_zero() -> None:
    assert [_pause(tries, 1.0) for tries in (1, 2, 3, 4, 5, 6, 60)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert _pause(5, 0.0) == 0.0
    assert _pause(5, 0.25) == 2.0


def test_a_pause_is_no_shorter_than_the_server_asked_for() -> None:
    assert _pause(1, 0.0, 3.0) == 3.0
    assert _pause(2, 0.5, 3.0) == 3.5


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("soon", None),
        ("-3", None),
        ("²", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 37.0),
        ("Sun, 06 Nov 1994 08:48:37 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert read_retry_after(value, now_unix_s=784111740.0) == seconds
