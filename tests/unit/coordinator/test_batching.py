"""Batch plans: nothing lost, balanced, within budget, deterministic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_coordinator.batching import padded_tokens, plan_batch

from shoal.errors import InvalidRequestError
from shoal.queue.entries import QueuedGroup
from shoal.types import Batch, RecordRef
from tests.helpers.experience import make_queued


def keys_of(batch: Batch) -> list[str]:
    return [ref.key for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro]


def mini_batch_refs(batch: Batch, number: int) -> list[RecordRef]:
    return [ref for rank in batch.ranks for micro in rank[number].micro_batches for ref in micro]


def rank_tokens(batch: Batch) -> list[int]:
    return [
        sum(ref.num_prompt_tokens + ref.num_response_tokens for mini in rank for micro in mini.micro_batches for ref in micro)
        for rank in batch.ranks
    ]


groups_strategy = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=12).map(
    lambda groups: [make_queued(f"g{index}", lengths) for index, lengths in enumerate(groups)]
)


@settings(max_examples=60, deadline=None)
@given(groups=groups_strategy, num_ranks=st.integers(1, 4), mini_batches=st.integers(1, 4), budget=st.integers(1, 200))
def test_plan_has_every_record_once_in_equal_shapes_within_the_budget(
    groups: list[QueuedGroup], num_ranks: int, mini_batches: int, budget: int
) -> None:
    expected = sorted(ref.key for group in groups for ref in group.refs)
    if len(expected) < mini_batches:
        return
    batch = plan_batch(groups, num_ranks, mini_batches, budget, "run", 4)
    assert (batch.run_id, batch.step, len(batch.ranks)) == ("run", 4, num_ranks)
    assert sorted(keys_of(batch)) == expected
    assert {len(rank) for rank in batch.ranks} == {mini_batches}
    for number in range(mini_batches):
        assert len({len(rank[number].micro_batches) for rank in batch.ranks}) == 1
        assert mini_batch_refs(batch, number)
    for micro in (micro for rank in batch.ranks for mini in rank for micro in mini.micro_batches):
        assert padded_tokens(micro) <= budget or len(micro) == 1


@settings(max_examples=30, deadline=None)
@given(groups=groups_strategy, shuffle_seed=st.integers(0, 100))
def test_plan_does_not_depend_on_the_order_of_arrival(groups: list[QueuedGroup], shuffle_seed: int) -> None:
    arrived = list(groups)
    random.Random(shuffle_seed).shuffle(arrived)
    assert plan_batch(arrived, 2, 1, 64, "run", 1) == plan_batch(groups, 2, 1, 64, "run", 1)


def test_mini_batches_are_the_same_for_gangs_of_different_size() -> None:
    groups = [make_queued(f"g{index}", [index + 1, 2 * index + 1, 5]) for index in range(7)]
    one, three = plan_batch(groups, 1, 3, 100, "run", 1), plan_batch(groups, 3, 3, 17, "run", 1)
    for number in range(3):
        assert {ref.key for ref in mini_batch_refs(one, number)} == {ref.key for ref in mini_batch_refs(three, number)}


def test_groups_stay_together_and_mini_batches_are_equally_large() -> None:
    batch = plan_batch([make_queued(f"g{index}", [4] * 4) for index in range(6)], 2, 3, 1000, "run", 1)
    for number in range(3):
        refs = mini_batch_refs(batch, number)
        assert len(refs) == 8
        assert len({ref.group_id for ref in refs}) == 2


def test_too_few_groups_are_split_over_mini_batches() -> None:
    batch = plan_batch([make_queued("g", [4] * 6)], 1, 3, 1000, "run", 1)
    assert [len(mini_batch_refs(batch, number)) for number in range(3)] == [2, 2, 2]


def test_ranks_get_equal_tokens() -> None:
    batch = plan_batch([make_queued("g", [50, 7, 9, 12, 11, 13], num_prompt_tokens=1)], 2, 1, 10_000, "run", 1)
    # 108 tokens in all: the long one (51) goes alone with little else.
    assert sorted(rank_tokens(batch)) == [51, 57]


def test_equal_lengths_give_ranks_equal_counts() -> None:
    batch = plan_batch([make_queued(f"g{index}", [8] * 8) for index in range(4)], 4, 1, 10_000, "run", 1)
    assert rank_tokens(batch) == [8 * 11] * 4


def test_similar_lengths_share_a_micro_batch() -> None:
    batch = plan_batch([make_queued("g", [1, 30, 2, 29], num_prompt_tokens=1)], 1, 1, 62, "run", 1)
    ((mini,),) = batch.ranks
    assert [[ref.num_response_tokens for ref in micro] for micro in mini.micro_batches] == [[30, 29], [2, 1]]


def test_sequence_above_the_budget_gets_a_micro_batch_of_its_own() -> None:
    batch = plan_batch([make_queued("g", [100, 3, 4])], 1, 1, 20, "run", 1)
    ((mini,),) = batch.ranks
    assert [[ref.num_response_tokens for ref in micro] for micro in mini.micro_batches] == [[100], [4, 3]]


def test_ranks_with_less_get_empty_micro_batches_at_the_end() -> None:
    batch = plan_batch([make_queued("g", [30, 4, 4, 4, 4, 4], num_prompt_tokens=1)], 2, 1, 10, "run", 1)
    shapes = [[len(micro) for micro in rank[0].micro_batches] for rank in batch.ranks]
    assert shapes == [[1, 0, 0], [2, 2, 1]]


def test_padding_counts_prompts_and_responses_separately() -> None:
    long_prompt = make_queued("a", [1], num_prompt_tokens=10).refs
    long_response = make_queued("b", [9], num_prompt_tokens=2).refs
    assert padded_tokens([*long_prompt, *long_response]) == 2 * (10 + 9)
    assert padded_tokens([]) == 0


@pytest.mark.parametrize(
    ("groups", "sizes", "match"),
    [
        ([make_queued("g", [1])], (0, 1, 10), "num_ranks is 0"),
        ([make_queued("g", [1])], (1, 0, 10), "mini_batches is 0"),
        ([make_queued("g", [1])], (1, 1, 0), "micro_batch_tokens is 0"),
        ([make_queued("g", [1, 1])], (1, 3, 10), r"2 samples cannot be split into 3 mini-batches.*algorithm\.mini_batches"),
        ([], (1, 1, 10), "0 samples"),
        ([make_queued("g", [1]), make_queued("g", [1])], (1, 1, 10), "1 of 2 records occur twice"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(groups: list[QueuedGroup], sizes: tuple[int, int, int], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        plan_batch(groups, *sizes, "run", 1)
