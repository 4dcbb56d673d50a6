"""Comparisons of a shadow with the active revision, by hand and against scipy."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from shoal_coordinator.rewards.agreement import Percentiles
from shoal_coordinator.rewards.comparison import (
    MAX_KEPT_SAMPLES,
    MAX_POINTS,
    MAX_TEXT_CHARS,
    MAX_WORST,
    ComparedGroup,
    Comparison,
    ComparisonTally,
    Sides,
    Verdict,
    compare_group,
    verdicts_of,
)

from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus

REST_FIELDS = {"number", "active", "num_groups", "num_samples", "num_dropped", "mean", "std", "pearson", "spearman", "num_pairs"} | {
    "ranking_disagreement",
    "latency_ms",
    "error_share",
    "not_scored_share",
    "points",
    "worst",
    "first_error",
}


def scored(value: float, latency_ms: float | None = None) -> Verdict:
    return Verdict(status=ScoreStatus.SCORED, value=value, latency_ms=latency_ms)


def unscored(status: ScoreStatus = ScoreStatus.ERROR) -> Verdict:
    return Verdict(status=status, value=0.0, latency_ms=None)


def make_group(active: list[Verdict], shadow: list[Verdict], name: str = "g", error: str = "", response: str = "answer") -> ComparedGroup:
    samples = [
        ScoreSample(
            sample_id=f"{name}/{index}/1",
            prompt=f"prompt {name}",
            response=f"{response} {index}",
            row={},
            finish_reason=FinishReason.STOP,
            num_response_tokens=1,
        )
        for index in range(len(active))
    ]
    return compare_group(samples, tuple(active), tuple(shadow), error)


def compared(*groups: ComparedGroup, max_samples: int = MAX_KEPT_SAMPLES) -> Comparison:
    tally = ComparisonTally(3, 2, max_samples=max_samples)
    for group in groups:
        tally.add(group)
    return tally.comparison()


def test_comparison_by_hand() -> None:
    first = make_group([scored(0), scored(1), scored(1)], [scored(2), scored(4), scored(3)], "a")
    second = make_group([scored(1), scored(0)], [scored(2), scored(4)], "b")
    comparison = compared(first, second)
    assert (comparison.number, comparison.active, comparison.num_groups, comparison.num_samples) == (3, 2, 2, 5)
    assert (comparison.mean.active, comparison.mean.shadow) == pytest.approx((0.6, 3.0))
    # Population: (3 x 0.16 + 2 x 0.36) / 5 and 4 / 5.
    assert (comparison.std.active, comparison.std.shadow) == pytest.approx((0.24**0.5, 0.8**0.5))
    # Group a: 0 before 1, twice, as the shadow has it, and a tie against an order; group b: the other way round.
    assert (comparison.num_pairs, comparison.ranking_disagreement) == (4, 1.5 / 4)
    assert comparison.points == ((0, 2), (1, 4), (1, 3), (1, 2), (0, 4))


def test_only_samples_that_both_scored_are_compared() -> None:
    declined = unscored(ScoreStatus.NOT_SCORED)
    group = make_group([scored(1), unscored(), scored(3), scored(4)], [scored(10), scored(20), declined, unscored()], error="killed")
    comparison = compared(group)
    assert (comparison.num_samples, comparison.points) == (1, ((1, 10),))
    assert comparison.error_share == Sides(active=0.25, shadow=0.25)
    assert comparison.not_scored_share == Sides(active=0.0, shadow=0.25)
    assert (comparison.num_pairs, comparison.ranking_disagreement, comparison.first_error) == (0, None, "killed")


def test_comparison_without_samples_says_nothing() -> None:
    for comparison in (compared(), compared(make_group([scored(1)], [unscored()]))):
        nothing = Sides(active=None, shadow=None)
        assert (comparison.mean, comparison.std, comparison.pearson, comparison.spearman) == (nothing, nothing, None, None)
        assert (comparison.num_samples, comparison.points, comparison.worst) == (0, (), ())
    assert compared() == Comparison(number=3, active=2)


def test_constant_side_has_no_correlation_and_no_deviation() -> None:
    comparison = compared(make_group([scored(0.1)] * 3, [scored(1), scored(2), scored(3)]))
    assert (comparison.pearson, comparison.spearman, comparison.std.active) == (None, None, 0.0)
    assert comparison.ranking_disagreement == 0.5


REWARDS = st.integers(-4, 4).map(lambda quarters: quarters / 4)


@given(st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=6), min_size=1, max_size=12))
def test_statistics_are_those_of_scipy(groups: list[list[tuple[float, float]]]) -> None:
    comparison = compared(*(make_group([scored(a) for a, _ in group], [scored(b) for _, b in group]) for group in groups))
    active, shadow = np.array([pair for group in groups for pair in group], np.float64).T
    assert comparison.mean.active == pytest.approx(np.mean(active), abs=1e-12)
    assert comparison.std.shadow == pytest.approx(np.std(shadow), abs=1e-12)
    if comparison.pearson is None or comparison.spearman is None:
        assert min(len(set(active)), len(set(shadow))) == 1
    else:
        assert comparison.pearson == pytest.approx(scipy.stats.pearsonr(active, shadow).statistic, abs=1e-12)
        assert comparison.spearman == pytest.approx(scipy.stats.spearmanr(active, shadow).statistic, abs=1e-12)


def test_latency_is_the_reported_one_and_missing_where_none_was_reported() -> None:
    def answer(latency_ms: float) -> ScoreResult:
        return ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.0, latency_ms=latency_ms)

    verdicts = verdicts_of([answer(7.0), answer(0.0), answer(1.0)])
    assert [verdict.latency_ms for verdict in verdicts] == [7.0, None, 1.0]
    comparison = compared(make_group(list(verdicts), [unscored()] * 3))
    latency_ms = comparison.latency_ms.active
    assert [latency_ms.p50, latency_ms.p95, latency_ms.p99] == pytest.approx([4.0, 6.7, 6.94])
    assert comparison.latency_ms.shadow == Percentiles(p50=None, p95=None, p99=None)


def test_worst_cases_are_those_furthest_apart_in_standard_deviations() -> None:
    # The shadow has ten times the scale; it agrees but for "b", which it likes and the active one does not.
    agreeing = [make_group([scored(number % 2)], [scored(10 * (number % 2))], f"g{number}") for number in range(20)]
    comparison = compared(*agreeing, make_group([scored(0)], [scored(10)], "b", response="x" * 600))
    worst = comparison.worst[0]
    assert (worst.sample_id, worst.prompt, worst.active, worst.shadow) == ("b/0/1", "prompt b", 0, 10)
    assert len(worst.response) == MAX_TEXT_CHARS
    assert worst.response.startswith("xxx")
    assert worst.response.endswith("…")
    assert len(comparison.worst) == MAX_WORST


def test_revisions_that_agree_but_for_scale_have_no_worst_case() -> None:
    assert compared(make_group([scored(0.1), scored(0.7), scored(0.3)], [scored(1.1), scored(7.1), scored(3.1)])).worst == ()


def test_points_are_the_latest() -> None:
    groups = [make_group([scored(number)], [scored(-number)]) for number in range(MAX_POINTS + 5)]
    comparison = compared(*groups)
    assert (len(comparison.points), comparison.points[0], comparison.points[-1]) == (MAX_POINTS, (5, -5), (MAX_POINTS + 4, -MAX_POINTS - 4))


def test_statistics_forget_the_oldest_groups_but_counts_do_not() -> None:
    failed = make_group([scored(100)] * 2, [unscored()] * 2, error="starting")
    good = [make_group([scored(number), scored(number + 1)], [scored(number), scored(number + 1)]) for number in range(3)]
    comparison = compared(failed, *good, max_samples=4)
    assert (comparison.num_groups, comparison.num_samples, len(comparison.points)) == (4, 6, 4)
    assert (comparison.error_share.shadow, comparison.first_error, comparison.mean.active) == (0.0, None, 2.0)
    assert comparison.num_pairs == 2


def test_memory_is_bounded_and_a_group_above_the_bound_is_kept_alone() -> None:
    tally = ComparisonTally(3, 2, max_samples=10)
    for number in range(100):
        tally.add(make_group([scored(number)] * 3, [scored(number)] * 3))
    assert len(tally.comparison().points) == 9
    tally.add(make_group([scored(7)] * 12, [scored(7)] * 12))
    assert tally.comparison().points == ((7, 7),) * 12


def test_comparison_as_json_has_the_fields_of_the_rest_answer() -> None:
    comparison = compared(make_group([scored(0, 3.0), scored(1)], [scored(1), scored(0)]))
    document = json.loads(json.dumps(asdict(comparison), allow_nan=False))
    assert set(document) == REST_FIELDS
    assert (document["mean"], document["points"]) == ({"active": 0.5, "shadow": 0.5}, [[0, 1], [1, 0]])
    assert document["latency_ms"]["active"] == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert set(document["worst"][0]) == {"sample_id", "prompt", "response", "active", "shadow"}
