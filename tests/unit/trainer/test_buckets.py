"""Buckets hold every sequence once and cost no more than one bucket or one each."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal_trainer.buckets import MAX_WIDTHS, pass_overhead_tokens, split_by_length


def cost(buckets: list[list[int]], lengths: list[int], overhead_tokens: float) -> float:
    return sum(overhead_tokens + len(bucket) * max(lengths[index] for index in bucket) for bucket in buckets)


def cheapest(lengths: list[int], overhead_tokens: float) -> float:
    """Every way to cut the sorted sequences."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = float("inf")
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        buckets = [[order[0]]]
        for cut, index in zip(cuts, order[1:], strict=True):
            if cut:
                buckets.append([])
            buckets[-1].append(index)
        best = min(best, cost(buckets, lengths, overhead_tokens))
    return best


@given(lengths=st.lists(st.integers(1, MAX_WIDTHS), min_size=1, max_size=8), overhead_tokens=st.floats(0, 60))
def test_split_by_length_finds_the_cheapest_buckets(lengths: list[int], overhead_tokens: float) -> None:
    buckets = split_by_length(lengths, overhead_tokens)
    assert sorted(itertools.chain.from_iterable(buckets)) == list(range(len(lengths)))
    assert cost(buckets, lengths, overhead_tokens) <= cheapest(lengths, overhead_tokens) + 1e-6


def test_split_by_length_of_many_long_sequences_is_coarse_but_complete() -> None:
    lengths = [1 + (7919 * i) % 4000 for i in range(2000)]
    buckets = split_by_length(lengths, 100.0)
    assert 1 < len(buckets) <= MAX_WIDTHS
    assert sorted(itertools.chain.from_iterable(buckets)) == list(range(2000))
    assert cost(buckets, lengths, 100.0) < 0.6 * cost([list(range(2000))], lengths, 100.0)


def test_split_by_length_keeps_equal_lengths_together() -> None:
    assert split_by_length([5, 5, 5], 0.0) == [[0, 1, 2]]
    assert split_by_length([], 10.0) == []


def test_split_by_length_makes_one_bucket_where_a_pass_costs_anything() -> None:
    assert sorted(split_by_length([1, 30, 2, 500, 7], float("inf"))[0]) == [0, 1, 2, 3, 4]


def test_pass_overhead_is_larger_for_small_models_and_gpus() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert pass_overhead_tokens(10**6, cpu) > pass_overhead_tokens(10**8, cpu)
    assert pass_overhead_tokens(10**8, gpu) > pass_overhead_tokens(10**8, cpu)
