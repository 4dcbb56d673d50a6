"""Boxes as arrays against naive loops over pairs, and cutting into buckets."""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.types.weights import Box
from shoal.weights import box_table, boxes
from shoal.weights.box_table import BoxTable, Sweep
from shoal.weights.geometry import split_boxes
from tests.helpers.layouts import box

SHAPES = ((6, 5), (4, 4, 3), (7,), ())


@st.composite
def owned_boxes(draw: st.DrawFn) -> list[tuple[int, Box]]:
    """Up to 12 boxes inside SHAPES, some of them empty."""
    owned = []
    for owner in draw(st.lists(st.integers(0, len(SHAPES) - 1), max_size=12)):
        offsets = [draw(st.integers(0, size)) for size in SHAPES[owner]]
        sizes = [draw(st.integers(0, size - offset)) for offset, size in zip(offsets, SHAPES[owner], strict=True)]
        owned.append((owner, Box(offsets=tuple(offsets), sizes=tuple(sizes))))
    return owned


def table_of(owned: list[tuple[int, Box]]) -> BoxTable:
    return BoxTable.of([owner for owner, _ in owned], [box for _, box in owned])


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_table, "_CANDIDATES_AT_ONCE", 3)


@given(owned_boxes())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_find_overlap_agrees_with_comparing_all_pairs(owned: list[tuple[int, Box]]) -> None:
    overlapping = {
        frozenset((left, right))
        for (left, (owner, one)), (right, (other_owner, other)) in combinations(enumerate(owned), 2)
        if owner == other_owner and boxes.intersect(one, other) is not None
    }
    found = table_of(owned).find_overlap()
    assert (frozenset(found) in overlapping) if found is not None else not overlapping


@given(owned_boxes(), owned_boxes())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sweep_candidates_contain_every_intersection_once(shards: list[tuple[int, Box]], regions: list[tuple[int, Box]]) -> None:
    whole = [(owner, boxes.whole(shape)) for owner, shape in enumerate(SHAPES)]
    shards = [*whole, *(pair for pair in shards if pair[1].num_elements)]
    regions = [pair for pair in regions if pair[1].num_elements]
    width = max(table_of(shards).width, table_of(regions).width)
    sweep = Sweep(table_of(shards).widen(width))
    pairs = [
        pair for left, right in sweep.candidates(table_of(regions).widen(width)) for pair in zip(left.tolist(), right.tolist(), strict=True)
    ]
    assert len(pairs) == len(set(pairs))
    candidates = {(region, int(sweep.order[shard])) for region, shard in pairs}
    for left, (owner, region) in enumerate(regions):
        for right, (other, shard) in enumerate(shards):
            if owner == other and boxes.intersect(region, shard) is not None:
                assert (left, right) in candidates


def test_outside_names_boxes_that_leave_their_shape_or_have_other_dims() -> None:
    inside = [(0, box((0, 6), (0, 5))), (2, box((7, 7))), (3, box())]
    outside = [
        (0, box((0, 7), (0, 5))),
        (0, box((0, 6))),
        (2, box((-1, 3))),
        (2, box((3, 2))),
        (3, box((0, 1))),
        (0, Box(offsets=(0, 0), sizes=(1,))),
    ]
    table = table_of([*inside, *outside])
    assert table.outside(SHAPES).tolist() == list(range(len(inside), len(inside) + len(outside)))


def test_table_gives_its_boxes_back() -> None:
    owned = [(0, box((1, 6), (0, 5))), (2, box((2, 7))), (3, box()), (1, box((0, 4), (1, 4), (2, 3)))]
    assert [table_of(owned).box(row) for row in range(4)] == [box for _, box in owned]


@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.sampled_from([1, 2, 4]), st.integers(8, 200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_split_boxes_covers_a_box_once_with_parts_no_larger_than_a_bucket(sizes: list[int], item: int, bucket_bytes: int) -> None:
    rows, starts, parts = split_boxes(np.array([sizes]), np.array([item]), bucket_bytes)
    assert rows.tolist() == [0] * len(parts)
    covered = np.zeros(sizes, np.int64)
    for start, size in zip(starts.tolist(), parts.tolist(), strict=True):
        assert prod(size) * item <= bucket_bytes
        covered[tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))] += 1
    assert (covered == 1).all()
    assert starts.tolist() == sorted(starts.tolist())
