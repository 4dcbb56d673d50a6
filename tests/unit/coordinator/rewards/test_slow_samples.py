"""Which samples are listed as slow."""

from __future__ import annotations

from shoal_coordinator.rewards.slow_samples import MAX_LATENCIES, MAX_SCORERS, MAX_SLOW_SAMPLES, MIN_LATENCIES, SlowSample, SlowSamples


def note(slow: SlowSamples, latencies_ms: list[float], scorer: str = "sum") -> None:
    for number, latency_ms in enumerate(latencies_ms):
        slow.note(scorer, "1", "reward-0", f"g{number}/0/1", latency_ms)


def test_sample_above_the_99th_percentile_is_listed_with_its_ids() -> None:
    slow = SlowSamples()
    note(slow, [float(number) for number in range(1, 101)])
    slow.note("sum", "1", "reward-1", "g7/3/0", 99.5)
    slow.note("sum", "1", "reward-1", "g8/3/0", 50.0)
    expected = SlowSample(sample_id="g7/3/0", scorer="sum", version="1", service="reward-1", latency_ms=99.5, p99_ms=99.0)
    assert slow.samples() == (expected,)


def test_nothing_is_slow_before_there_are_enough_latencies() -> None:
    slow = SlowSamples()
    note(slow, [float(number) for number in range(MIN_LATENCIES)])
    assert slow.samples() == ()
    slow.note("sum", "1", "reward-0", "g/0/0", 1e6)
    assert len(slow.samples()) == 1


def test_scorers_and_versions_have_percentiles_of_their_own() -> None:
    slow = SlowSamples()
    note(slow, [1.0] * 200)
    slow.note("judge", "1", "reward-0", "g/0/0", 1e6)
    slow.note("sum", "2", "reward-0", "g/0/0", 1e6)
    assert slow.samples() == ()


def test_percentile_follows_the_latest_samples() -> None:
    slow = SlowSamples()
    note(slow, [1000.0] * MAX_LATENCIES)
    note(slow, [1.0] * MAX_LATENCIES)
    slow.note("sum", "1", "reward-0", "g/0/0", 2.0)
    assert slow.samples()[0].p99_ms == 1.0


def test_newest_come_first_and_the_oldest_go() -> None:
    slow = SlowSamples()
    note(slow, [1.0] * MAX_LATENCIES)
    for number in range(MAX_SLOW_SAMPLES + 5):
        slow.note("sum", "1", "reward-0", f"slow-{number}/0/0", 10.0 + number)
    ids = [sample.sample_id for sample in slow.samples()]
    assert len(ids) == MAX_SLOW_SAMPLES
    assert (ids[0], ids[-1]) == (f"slow-{MAX_SLOW_SAMPLES + 4}/0/0", "slow-5/0/0")


def test_number_of_scorers_is_bounded() -> None:
    slow = SlowSamples()
    for number in range(2 * MAX_SCORERS):
        slow.note(f"s{number}", "1", "reward-0", "g/0/0", 1.0)
    assert len(slow._latencies) == MAX_SCORERS
