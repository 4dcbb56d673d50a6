from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_reward.models.batches import plan_batches


def test_similar_lengths_go_together_within_the_budget() -> None:
    assert plan_batches([3, 9, 4, 8, 1], max_tokens=18, max_samples=10) == [[1, 3], [2, 0, 4]]
    assert plan_batches([3, 3, 3], max_tokens=100, max_samples=2) == [[0, 1], [2]]
    assert plan_batches([50, 2], max_tokens=10, max_samples=2) == [[0], [1]]
    assert plan_batches([], max_tokens=10, max_samples=2) == []


@given(st.lists(st.integers(1, 50)), st.integers(1, 100), st.integers(1, 5))
def test_every_sample_is_in_one_batch_and_batches_keep_their_bounds(lengths: list[int], max_tokens: int, max_samples: int) -> None:
    batches = plan_batches(lengths, max_tokens=max_tokens, max_samples=max_samples)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or (len(batch) <= max_samples and len(batch) * max(lengths[index] for index in batch) <= max_tokens)


@pytest.mark.parametrize("max_tokens", [20, 25])
def test_a_batch_is_as_full_as_the_budget_lets_it_be(max_tokens: int) -> None:
    assert [len(batch) for batch in plan_batches([5] * 8, max_tokens=max_tokens, max_samples=100)] == (
        [4, 4] if max_tokens == 20 else [5, 3]
    )
