"""Estimators that compare the samples of one prompt against given numbers, hand-computed tensors and naive loops."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.group_advantages import (
    dr_grpo_estimator,
    frac_zero_std,
    gdpo_advantages,
    gdpo_estimator,
    group_statistics,
    grpo_advantages,
    reinforce_pp_baseline_estimator,
    rloo_advantages,
)
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, math_case, numbers


def group_index(uids: list[str]) -> tuple[Tensor, int]:
    order = sorted(set(uids))
    return torch.tensor([order.index(uid) for uid in uids]), len(order)


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
    of_groups = group_statistics(rewards, index, num_groups)
    assert float(frac_zero_std(of_groups, index, num_groups)) == case["expected"]["frac_zero_std_groups"]


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
    for group_std in ("sample", "population"):
        for baseline in ("mean", "leave_one_out"):
            advantages = grpo_advantages(rewards, index, num_groups, group_std=group_std, group_baseline=baseline)
            assert 1 < float(advantages.abs().max()) <= 10


def test_group_of_one_gets_no_advantage() -> None:
    scores, index = torch.tensor([0.7]), torch.tensor([0])
    assert float(grpo_advantages(scores, index, 1)) == 0.0
    assert float(rloo_advantages(scores, index, 1)) == 0.0


def test_leave_one_out_baseline_divides_by_the_deviation_of_the_whole_group() -> None:
    scores, index = numbers([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)
    advantages = grpo_advantages(scores, index, 1, group_eps=0.0, group_baseline="leave_one_out")
    std = statistics.stdev([1.0, 0.0, 0.0, 1.0])
    assert_close(advantages, [(1 - 1 / 3) / std, (0 - 2 / 3) / std, (0 - 2 / 3) / std, (1 - 1 / 3) / std])
    undivided = grpo_advantages(scores, index, 1, group_std="none", group_baseline="leave_one_out")
    assert_close(undivided, rloo_advantages(scores, index, 1).tolist())


def test_grpo_refuses_unknown_baseline() -> None:
    with pytest.raises(ConfigError, match="group_baseline is 'median'; use one of leave_one_out, mean"):
        grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), 1, group_baseline="median")


def test_dr_grpo_is_the_reward_minus_the_mean() -> None:
    inputs = AdvantageInputs(
        rewards=numbers([[0.0, 1.0], [0.5, 0.0]]),
        response_mask=torch.tensor([[True, True], [True, False]]),
        group_index=torch.zeros(2, dtype=torch.long),
        num_groups=1,
    )
    advantages, _ = dr_grpo_estimator(inputs)
    assert_close(advantages, [[0.25, 0.25], [-0.25, 0.0]])


def test_zero_spread_share_counts_groups_with_a_score_only() -> None:
    scores = numbers([1.0, 1.0, 0.0, 1.0, "nan", "nan", 0.5])
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    of_groups = group_statistics(scores, index, 4)
    assert float(frac_zero_std(of_groups, index, 4)) == pytest.approx(2 / 3)


def naive_gdpo(components: list[list[float]], weights: list[float], groups: list[list[int]], eps: float) -> list[float]:
    """The definition in plain Python; every component is scored."""
    totals = [0.0] * len(components)
    for k, weight in enumerate(weights):
        for members in groups:
            values = [components[i][k] for i in members]
            for i in members:
                totals[i] += weight * (components[i][k] - statistics.mean(values)) / (statistics.stdev(values) + eps)
    mean, std = statistics.mean(totals), statistics.stdev(totals)
    return [(total - mean) / (std + eps) for total in totals]


def test_gdpo_equals_naive_loops() -> None:
    components = [[1.0, 10.0], [0.0, 30.0], [1.0, 0.0], [0.0, 0.0], [1.0, 5.0], [0.5, 0.0]]
    expected = naive_gdpo(components, [1.0, 0.25], [[0, 2, 4], [1, 3, 5]], 1e-6)
    index = torch.tensor([0, 1, 0, 1, 0, 1])
    assert_close(gdpo_advantages(numbers(components), (1.0, 0.25), index, 2), expected)


def test_gdpo_does_not_depend_on_the_scale_of_a_component() -> None:
    components = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([0, 0, 0, 1, 1, 1])
    plain = gdpo_advantages(components, (1.0, 1.0), index, 2, group_eps=0.0)
    scaled = gdpo_advantages(components * torch.tensor([1.0, 100.0]), (1.0, 1.0), index, 2, group_eps=0.0)
    assert_close(scaled, plain.tolist())


def test_gdpo_without_division_is_the_centred_weighted_sum() -> None:
    components, index = numbers([[1.0, 2.0], [0.0, 6.0]]), torch.zeros(2, dtype=torch.long)
    assert_close(gdpo_advantages(components, (1.0, 0.5), index, 1, group_std="none"), [-0.5, 0.5])


def test_gdpo_leaves_a_missing_component_out_of_its_statistics_and_the_sequence_out_of_training() -> None:
    components = numbers([[1.0, 1.0], [0.0, 3.0], [0.5, "nan"]])
    index = torch.zeros(3, dtype=torch.long)
    advantages = gdpo_advantages(components, (1.0, 1.0), index, 1, group_std="population", group_eps=0.0)
    std = statistics.pstdev([1.0, 0.0, 0.5])
    totals = [0.5 / std - 1.0, -0.5 / std + 1.0]
    shift, spread = statistics.mean(totals), statistics.pstdev(totals)
    assert_close(advantages, [(totals[0] - shift) / spread, (totals[1] - shift) / spread, 0.0])


def test_gdpo_keeps_groups_without_spread_at_zero() -> None:
    components = numbers([[0.35, 1.0], [0.35, 1.0], [0.35, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    advantages = gdpo_advantages(components, (1.0, 1.0), torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert bool((advantages[3:] != 0).all())


def test_gdpo_needs_components_and_one_weight_each() -> None:
    inputs = AdvantageInputs(
        rewards=torch.zeros(1, 2), response_mask=torch.ones(1, 2, dtype=torch.bool), group_index=torch.tensor([0]), num_groups=1
    )
    with pytest.raises(ValueError, match="gdpo needs components"):
        gdpo_estimator(inputs)
    with pytest.raises(ValueError, match="1 weights for 2 components"):
        gdpo_advantages(torch.zeros(2, 2), (1.0,), torch.zeros(2, dtype=torch.long), 1)


def test_reinforce_pp_baseline_whitens_tokens_not_sequences() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = numbers([[0.0, 0.0, 1.0], [0.0, 5.0, 5.0]])
    inputs = AdvantageInputs(rewards=rewards, response_mask=mask, group_index=torch.zeros(2, dtype=torch.long), num_groups=1)
    advantages, _ = reinforce_pp_baseline_estimator(inputs)
    tokens = [0.5, 0.5, 0.5, -0.5]
    scale = (statistics.variance(tokens) + 1e-8) ** 0.5
    assert_close(advantages, [[0.25 / scale] * 3, [-0.75 / scale, 0.0, 0.0]])


@pytest.mark.parametrize("group_std", ["sample", "population", "none"])
def test_groups_without_spread_get_zeros_without_an_epsilon_too(group_std: str) -> None:
    scores, groups = torch.tensor([1.0, 1.0, 0.35, 0.0, 1.0]), torch.tensor([0, 0, 1, 2, 2])
    advantages = grpo_advantages(scores, groups, 3, group_std=group_std, group_eps=0.0)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert float(advantages[3]) == -float(advantages[4]) < 0
    # The second component takes back what the first gives, so that the batch has no spread.
    components = torch.stack((scores, scores), dim=1)
    assert gdpo_advantages(components, (1.0, -1.0), groups, 3, group_std=group_std, group_eps=0.0).tolist() == [0.0] * 5
