"""Estimators without groups against given numbers, hand-computed tensors and naive loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algo.advantages import AdvantageInputs, gae, gae_estimator, reinforce_pp_estimator, remax_estimator
from shoal.algo.masking import masked_moments
from shoal.algo.rewards import penalised_rewards
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


def test_reinforce_pp_equals_given_numbers() -> None:
    case = math_case("M-RPP-01")
    inputs, mask = case["inputs"], mask_of(case["inputs"]["mask"])
    rewards, _ = penalised_rewards(
        numbers(inputs["score"]), numbers(inputs["logprobs"]), numbers(inputs["ref_logprobs"]), mask, kl_coef=inputs["kl_coef"]
    )
    advantages, returns = reinforce_pp_estimator(AdvantageInputs(rewards=rewards, response_mask=mask), gamma=inputs["gamma"])
    assert_close(returns, case["expected"]["returns"])
    assert_close(advantages, case["expected"]["advantages"])


def test_gae_estimator_gives_nothing_to_a_row_that_is_not_scored() -> None:
    rewards, values = torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), torch.tensor([[0.3, 0.4], [0.1, 0.2]])
    inputs = AdvantageInputs(rewards=rewards, response_mask=torch.ones(2, 2, dtype=torch.bool), values=values)
    advantages, returns = gae_estimator(inputs, gamma=1.0, lam=1.0, whiten_advantages=False)
    assert_close(advantages, [[0.0, 0.0], [0.9, 0.8]], rtol=1e-6)
    assert_close(returns, [[0.3, 0.4], [1.0, 1.0]], rtol=1e-6)


def test_remax_subtracts_the_greedy_reward_from_the_reward_to_go() -> None:
    inputs = AdvantageInputs(
        rewards=numbers([[0.1, 0.0, 1.0], [0.0, 2.0, "nan"], [0.0, 0.0, 1.0]]),
        response_mask=torch.tensor([[True, False, True], [True, True, False], [True, True, True]]),
        baselines=numbers([0.25, 0.5, "nan"]),
    )
    advantages, returns = remax_estimator(inputs)
    assert_close(returns, [[1.1, 0.0, 1.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close(advantages, [[0.85, 0.0, 0.75], [1.5, 1.5, 0.0], [0.0, 0.0, 0.0]])


def test_remax_without_greedy_rewards_is_refused() -> None:
    inputs = AdvantageInputs(rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="remax needs baselines"):
        remax_estimator(inputs)


def test_gae_of_no_response_token_is_empty_and_carries_no_gradient() -> None:
    nothing, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    for result in gae(nothing, nothing, mask, gamma=1.0, lam=1.0):
        assert result.shape == (2, 0)
    bootstrap = torch.tensor([0.5], requires_grad=True)
    one, trained = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    for result in gae(one, one, trained, gamma=1.0, lam=1.0, bootstrap_values=bootstrap):
        assert not result.requires_grad
