"""Statistics of two rewards, against scipy and by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from shoal_coordinator.rewards.agreement import (
    MAX_ORDERED_SIBLINGS,
    Float64Array,
    PairCount,
    Percentiles,
    average_ranks,
    count_pairs,
    pearson,
    percentiles,
    spearman,
    z_scores,
)

REWARDS = st.integers(-8, 8).map(lambda eighths: eighths / 8)
TWO_REWARDS = st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=60)


def sides(pairs: list[tuple[float, float]]) -> tuple[Float64Array, Float64Array]:
    first, second = np.array(pairs, np.float64).T
    return first, second


def is_constant(values: Float64Array) -> bool:
    return len(set(values.tolist())) == 1


@given(TWO_REWARDS)
def test_correlations_are_those_of_scipy_and_none_where_scipy_has_none(pairs: list[tuple[float, float]]) -> None:
    first, second = sides(pairs)
    if is_constant(first) or is_constant(second):
        assert (pearson(first, second), spearman(first, second)) == (None, None)
        return
    assert pearson(first, second) == pytest.approx(scipy.stats.pearsonr(first, second).statistic, abs=1e-12)
    assert spearman(first, second) == pytest.approx(scipy.stats.spearmanr(first, second).statistic, abs=1e-12)


@given(st.lists(REWARDS, max_size=60))
def test_ranks_and_z_scores_are_those_of_scipy(values: list[float]) -> None:
    array = np.array(values, np.float64)
    np.testing.assert_array_equal(average_ranks(array), scipy.stats.rankdata(array))
    if values and not is_constant(array):
        np.testing.assert_allclose(z_scores(array), scipy.stats.zscore(array), atol=1e-12)
    else:
        assert not z_scores(array).any()


@given(st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=40))
def test_percentiles_are_those_of_scipy(values: list[float]) -> None:
    found = percentiles(np.array(values))
    expected = [scipy.stats.scoreatpercentile(values, percent) for percent in (50, 95, 99)]
    assert [found.p50, found.p95, found.p99] == pytest.approx(expected)


def test_percentiles_are_linear_between_ranks_and_none_without_values() -> None:
    found = percentiles(np.array([10.0, 20.0, 30.0, 40.0]))
    assert [found.p50, found.p95, found.p99] == pytest.approx([25.0, 38.5, 39.7])
    assert percentiles(np.array([])) == Percentiles(p50=None, p95=None, p99=None)


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1.0, 3e38, 1e300])
def test_correlation_survives_tiny_and_huge_rewards(scale: float) -> None:
    first = np.array([0.0, 1.0, 2.0, 4.0]) * scale
    assert pearson(first, np.array([0.0, 1.0, 2.0, 4.0])) == pytest.approx(1.0)
    assert pearson(first, np.array([0.0, -1.0, -2.0, -4.0])) == pytest.approx(-1.0)


@pytest.mark.parametrize("values", [[], [1.0], [0.1, 0.1, 0.1]])
def test_correlation_is_none_for_fewer_than_two_or_equal_rewards(values: list[float]) -> None:
    other = np.arange(len(values), dtype=np.float64)
    assert (pearson(np.array(values), other), spearman(other, np.array(values))) == (None, None)


def test_spearman_by_hand_with_ties() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, squares 4.5 and 5.
    assert spearman(np.array([0.0, 1.0, 1.0, 9.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # Pairs (a, b), (a, c), (b, c).
        ([1, 2, 3], [10, 20, 30], PairCount(num_pairs=3, num_different=0)),
        ([1, 2, 3], [3, 2, 1], PairCount(num_pairs=3, num_different=3)),
        # (a, b) the other way round; the other two alike.
        ([1, 2, 3], [2, 1, 3], PairCount(num_pairs=3, num_different=1)),
        # (a, b) is ordered by the first and a tie of the second: half; the other two alike.
        ([1, 2, 3], [1, 1, 3], PairCount(num_pairs=3, num_different=0.5)),
        # (a, b) is a tie of both and not counted; (a, c) and (b, c) are ties of the second alone.
        ([0, 0, 1], [5, 5, 5], PairCount(num_pairs=2, num_different=1)),
        ([0, 0, 0], [5, 5, 5], PairCount(num_pairs=0, num_different=0)),
        ([0], [5], PairCount(num_pairs=0, num_different=0)),
        ([], [], PairCount(num_pairs=0, num_different=0)),
    ],
)
def test_pairs_by_hand(first: list[float], second: list[float], expected: PairCount) -> None:
    assert count_pairs(first, second) == expected
    assert count_pairs(second, first) == expected


@given(st.lists(st.tuples(REWARDS, REWARDS), max_size=20))
def test_pairs_are_those_of_a_plain_loop(pairs: list[tuple[float, float]]) -> None:
    num_pairs, num_different = 0, 0.0
    for (a, x), (b, y) in itertools.combinations(pairs, 2):
        if a == b and x == y:
            continue
        num_pairs += 1
        if a == b or x == y:
            num_different += 0.5
        elif (a < b) != (x < y):
            num_different += 1
    assert count_pairs([a for a, _ in pairs], [x for _, x in pairs]) == PairCount(num_pairs=num_pairs, num_different=num_different)


@given(TWO_REWARDS)
def test_disagreement_without_ties_is_what_kendalls_tau_says(pairs: list[tuple[float, float]]) -> None:
    first, second = (scipy.stats.rankdata(side, method="ordinal") for side in sides(pairs))
    count = count_pairs(first.tolist(), second.tolist())
    tau = scipy.stats.kendalltau(first, second).statistic
    assert count.num_different / count.num_pairs == pytest.approx((1 - tau) / 2)


def test_pairs_of_a_huge_group_are_those_of_its_first_siblings() -> None:
    values = list(map(float, range(MAX_ORDERED_SIBLINGS + 100)))
    assert count_pairs(values, values) == PairCount(num_pairs=MAX_ORDERED_SIBLINGS * (MAX_ORDERED_SIBLINGS - 1) // 2, num_different=0)
