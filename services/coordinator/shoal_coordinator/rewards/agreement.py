"""How far two rewards of the same responses agree: pure statistics in float64.

Legend: N samples, G siblings of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

MAX_ORDERED_SIBLINGS = 256
"""The pairs of a group grow with its square; of a larger group the first so many siblings are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCount:
    """Sibling pairs that at least one of two rewards orders, and how many of these the two order differently (a tie is half of one)."""

    num_pairs: int = 0
    num_different: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of a number of values, linear between the two nearest ranks; None without any value."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


def pearson(first: Float64Array, second: Float64Array) -> float | None:
    """Linear correlation; None where it is undefined: fewer than two samples, or one side is constant.

    Args:
        first, second: [N] finite.
    """
    centred = [_centred(values) for values in (first, second)]
    if centred[0] is None or centred[1] is None:
        return None
    return float(np.clip(centred[0] @ centred[1], -1.0, 1.0))


def spearman(first: Float64Array, second: Float64Array) -> float | None:
    """Correlation of the ranks, ties sharing their average rank; None where it is undefined, as for `pearson`.

    Args:
        first, second: [N] finite.
    """
    return pearson(average_ranks(first), average_ranks(second))


def average_ranks(values: Float64Array) -> Float64Array:
    """Rank of each value, from 1; equal values share the mean of their ranks.

    Args:
        values: [N].
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], np.float64)


def count_pairs(first: Sequence[float], second: Sequence[float]) -> PairCount:
    """Compare the order that two rewards give the siblings of one group.

    A pair that one orders and the other ties counts as half a difference: whoever breaks the tie by chance is wrong half the time.
    Pairs that both tie say nothing and are not counted.

    Args:
        first, second: [G].
    """
    signs = [_pair_signs(np.asarray(values[:MAX_ORDERED_SIBLINGS], np.float64)) for values in (first, second)]
    is_ordered = (signs[0] != 0) | (signs[1] != 0)
    return PairCount(num_pairs=int(is_ordered.sum()), num_different=float(np.abs(signs[0] - signs[1]).sum() / 2))


def percentiles(values: Float64Array) -> Percentiles:
    """The percentiles of values.

    Args:
        values: [N].
    """
    if not values.size:
        return Percentiles()
    p50, p95, p99 = np.percentile(values, [50, 95, 99], method="linear")
    return Percentiles(p50=float(p50), p95=float(p95), p99=float(p99))


def z_scores(values: Float64Array) -> Float64Array:
    """Distance from the mean in (population) standard deviations; all 0 where the values are equal.

    Args:
        values: [N].
    """
    centred = _centred(values)
    return np.zeros_like(values) if centred is None else centred * np.sqrt(values.size)


def _centred(values: Float64Array) -> Float64Array | None:
    """Values less their mean, of length 1; None if they are equal or fewer than two."""
    if values.size < 2:
        return None
    # From 0 to 1 first: neither huge nor tiny values leave the range in which squares are exact enough.
    shifted = values - values.min()
    largest = shifted.max()
    if largest == 0:
        return None
    scaled = shifted / largest
    centred = scaled - scaled.mean()
    return np.asarray(centred / np.sqrt(centred @ centred), np.float64)


def _pair_signs(values: Float64Array) -> Float64Array:
    """[G x (G - 1) / 2]: 1 where the first of a pair is above the second, -1 where it is below, 0 where they tie."""
    above, below = np.triu_indices(values.size, k=1)
    return np.asarray(np.sign(values[above] - values[below]), np.float64)
