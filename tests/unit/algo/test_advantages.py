"""Estimators against given numbers, hand-computed tensors, naive loops, and splits over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs, gae, gae_estimator, reinforce_pp_estimator
from shoal.algo.group_advantages import group_statistics, grpo_advantages, grpo_estimator, rloo_advantages, rloo_estimator
from shoal.algo.masking import masked_moments
from shoal.algo.rewards import penalised_rewards
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers


def naive_gae(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """The double sum of the definition over the trained tokens of one row."""
    kept = [t for t, trained in enumerate(mask) if trained]
    result = [0.0] * len(mask)
    for i, t in enumerate(kept):
        for offset, u in enumerate(kept[i:]):
            following = kept[i + offset + 1 :]
            next_value = values[following[0]] if following else 0.0
            result[t] += (gamma * lam) ** offset * (rewards[u] + gamma * next_value - values[u])
    return result


def group_index(uids: list[str]) -> tuple[Tensor, int]:
    order = sorted(set(uids))
    return torch.tensor([order.index(uid) for uid in uids]), len(order)


@pytest.mark.parametrize("case_id", ["M-GAE-01", "M-GAE-02"])
def test_gae_equals_given_numbers(case_id: str) -> None:
    case = math_case(case_id)
    given_inputs = case["inputs"]
    advantages, returns = gae(
        numbers(given_inputs["rewards"]),
        numbers(given_inputs["values"]),
        mask_of(given_inputs["mask"]),
        gamma=given_inputs["gamma"],
        lam=given_inputs["lam"],
    )
    assert_close(advantages, case["expected"]["advantages"])
    assert_close(returns, case["expected"]["returns"])


@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_bootstraps_on_truncation_only_when_given_a_value(bootstrap: bool) -> None:
    case = math_case("M-GAE-03")
    inputs, expected = case["inputs"], case["expected"][f"bootstrap_on_truncation_{str(bootstrap).lower()}"]
    advantages, returns = gae(
        numbers(inputs["rewards"]),
        numbers(inputs["values"]),
        mask_of(inputs["mask"]),
        gamma=inputs["gamma"],
        lam=inputs["lam"],
        bootstrap_values=numbers(inputs["bootstrap_value"]) if bootstrap else None,
    )
    assert_close(advantages, expected["advantages"])
    assert_close(returns, expected["returns"])


rows = st.integers(1, 7).flatmap(
    lambda t: st.tuples(
        st.lists(st.floats(-3, 3), min_size=t, max_size=t),
        st.lists(st.floats(-3, 3), min_size=t, max_size=t),
        st.lists(st.booleans(), min_size=t, max_size=t),
    )
)


@settings(max_examples=60, deadline=None)
@given(row=rows, gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_equals_naive_double_sum(row: tuple[list[float], list[float], list[bool]], gamma: float, lam: float) -> None:
    rewards, values, mask = row
    dirty = torch.where(torch.tensor(mask), torch.tensor(values, dtype=torch.float64), torch.nan)
    advantages, returns = gae(torch.tensor([rewards], dtype=torch.float64), dirty[None], torch.tensor([mask]), gamma=gamma, lam=lam)
    expected = naive_gae(rewards, values, mask, gamma, lam)
    assert_close(advantages, [expected], atol=1e-9)
    assert_close(returns, [[a + v if m else 0.0 for a, v, m in zip(expected, values, mask, strict=True)]], atol=1e-9)


def test_gae_refuses_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match="does not fit mask"):
        gae(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)


def test_gae_estimator_whitens_over_the_batch_and_leaves_returns() -> None:
    torch.manual_seed(0)
    mask = torch.rand(5, 6) < 0.7
    inputs = AdvantageInputs(rewards=torch.randn(5, 6), response_mask=mask, values=torch.randn(5, 6))
    advantages, returns = gae_estimator(inputs, gamma=1.0, lam=0.9, whiten_advantages=True)
    plain, plain_returns = gae_estimator(inputs, gamma=1.0, lam=0.9, whiten_advantages=False)
    moments = masked_moments(advantages, mask)
    assert abs(float(moments.mean)) < 1e-6
    assert abs(float(moments.variance()) - 1.0) < 1e-5
    assert torch.equal(returns, plain_returns)
    assert not torch.allclose(advantages, plain)


def test_gae_estimator_without_values_is_refused() -> None:
    inputs = AdvantageInputs(rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="gae needs values"):
        gae_estimator(inputs, gamma=1.0, lam=1.0, whiten_advantages=True)


@pytest.mark.parametrize(("key", "group_std"), [("ddof1", "sample"), ("ddof0", "population"), ("no_std", "none")])
def test_grpo_equals_given_numbers(key: str, group_std: str) -> None:
    case = math_case("M-GRP-01")
    index, num_groups = group_index(case["inputs"]["uid"])
    advantages = grpo_advantages(numbers(case["inputs"]["rewards"]), index, num_groups, group_std=group_std)
    assert_close(advantages, case["expected"][key])


@pytest.mark.parametrize("group_std", ["sample", "population", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_gives_exact_zeros_to_groups_without_spread(group_std: str, dtype: torch.dtype) -> None:
    case = math_case("M-GRP-02")
    index, num_groups = group_index(case["inputs"]["uid"])
    rewards = numbers(case["inputs"]["rewards"], dtype)
    assert torch.equal(grpo_advantages(rewards, index, num_groups, group_std=group_std), torch.zeros(9, dtype=dtype))
    assert torch.equal(rloo_advantages(rewards, index, num_groups), torch.zeros(9, dtype=dtype))


def test_grpo_refuses_unknown_divisor() -> None:
    with pytest.raises(ConfigError, match="group_std is 'both'; use one of none, population, sample"):
        grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), 1, group_std="both")


def test_grpo_groups_by_index_and_leaves_unscored_samples_out() -> None:
    scores = numbers([1.0, 5.0, 0.0, "nan", 3.0])
    index = torch.tensor([0, 1, 0, 0, 1])
    assert_close(grpo_advantages(scores, index, 2, group_std="none"), [0.5, 1.0, -0.5, 0.0, -1.0])
    assert_close(group_statistics(scores, index, 2).size, [2, 2, 2, 2, 2])


def test_rloo_equals_given_numbers() -> None:
    case = math_case("M-RLO-01")
    index, num_groups = group_index(case["inputs"]["uid"])
    assert_close(rloo_advantages(numbers(case["inputs"]["rewards"]), index, num_groups), case["expected"]["advantages"])


def test_group_estimators_do_not_explode_for_one_odd_reward() -> None:
    case = math_case("M-GRP-05")
    index, num_groups = group_index(case["inputs"]["uid"])
    rewards = numbers(case["inputs"]["rewards"], torch.float32)
    assert_close(rloo_advantages(rewards, index, num_groups), case["expected"]["unnormalised"], rtol=1e-5, atol=1e-6)
    assert float(grpo_advantages(rewards, index, num_groups).abs().max()) <= 10


def test_group_of_one_gets_no_advantage() -> None:
    scores, index = torch.tensor([0.7]), torch.tensor([0])
    assert float(grpo_advantages(scores, index, 1)) == 0.0
    assert float(rloo_advantages(scores, index, 1)) == 0.0


def test_reinforce_pp_equals_given_numbers() -> None:
    case = math_case("M-RPP-01")
    inputs, mask = case["inputs"], mask_of(case["inputs"]["mask"])
    rewards, _ = penalised_rewards(
        numbers(inputs["score"]), numbers(inputs["logprobs"]), numbers(inputs["ref_logprobs"]), mask, kl_coef=inputs["kl_coef"]
    )
    advantages, returns = reinforce_pp_estimator(AdvantageInputs(rewards=rewards, response_mask=mask), gamma=inputs["gamma"])
    assert_close(returns, case["expected"]["returns"])
    assert_close(advantages, case["expected"]["advantages"])


ESTIMATORS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "gae": (gae_estimator, {"gamma": 0.99, "lam": 0.9, "whiten_advantages": True}),
    "grpo": (grpo_estimator, {}),
    "rloo": (rloo_estimator, {}),
    "reinforce_pp": (reinforce_pp_estimator, {"gamma": 0.9}),
}


class Rank:
    """SumOverRanks of one rank of a gang: answers the k-th reduction with the k-th recorded global sum."""

    def __init__(self, totals: list[Tensor]) -> None:
        self._totals = iter(totals)

    def __call__(self, local: Tensor) -> Tensor:
        total = next(self._totals)
        assert total.shape == local.shape
        return total


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_does_not_depend_on_the_split_over_ranks(name: str) -> None:
    estimator, keywords = ESTIMATORS[name]
    torch.manual_seed(1)
    index = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0])
    whole = AdvantageInputs(
        rewards=torch.randn(8, 5, dtype=torch.float64),
        response_mask=torch.rand(8, 5) < 0.8,
        values=torch.randn(8, 5, dtype=torch.float64),
        group_index=index,
        num_groups=3,
    )
    totals: list[Tensor] = []

    def record(local: Tensor) -> Tensor:
        totals.append(local)
        return local

    expected, _ = estimator(whole, record, **keywords)
    assert totals, "the estimator took no part in a reduction"
    for part in (slice(0, 3), slice(3, 8)):
        share = AdvantageInputs(
            rewards=whole.rewards[part],
            response_mask=whole.response_mask[part],
            values=None if whole.values is None else whole.values[part],
            group_index=index[part],
            num_groups=3,
        )
        advantages, _ = estimator(share, Rank(totals), **keywords)
        torch.testing.assert_close(advantages, expected[part], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_ignores_what_masked_slots_hold(name: str) -> None:
    estimator, keywords = ESTIMATORS[name]
    torch.manual_seed(2)
    mask = torch.rand(6, 5) < 0.6
    rewards, values = torch.randn(6, 5), torch.randn(6, 5)
    index = torch.tensor([0, 0, 0, 1, 1, 1])

    def run(garbage: float) -> tuple[Tensor, Tensor]:
        inputs = AdvantageInputs(
            rewards=torch.where(mask, rewards, garbage),
            response_mask=mask,
            values=torch.where(mask, values, garbage),
            group_index=index,
            num_groups=2,
        )
        return estimator(inputs, **keywords)

    for clean, dirty in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(clean, dirty)
        assert bool((dirty[~mask] == 0).all())


@pytest.mark.parametrize("estimator", [grpo_estimator, rloo_estimator])
def test_group_estimator_needs_groups(estimator: Callable[..., tuple[Tensor, Tensor]]) -> None:
    inputs = AdvantageInputs(rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="group_index"):
        estimator(inputs)
