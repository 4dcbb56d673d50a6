"""What holds for every registered estimator: a new line of the registry is covered by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.algo import registry
from shoal.algo.advantages import AdvantageInputs
from shoal.algo.masking import SumOverRanks
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import ESTIMATORS
from tests.helpers.simulated_gang import run_gang

Estimate = Callable[..., tuple[Tensor, Tensor]]
ROW_FIELDS = ("rewards", "response_mask", "values", "group_index", "bootstrap_values", "baselines", "components")
ALONE = {"remax"}
"""Estimators without a statistic over the batch."""

VARIANTS: list[dict[str, object]] = [
    *[dict[str, object](estimator=name) for name in ESTIMATORS],
    {"estimator": "gae", "whiten_advantages": False, "gamma": 0.97, "lam": 0.9},
    {"estimator": "grpo", "group_std": "population"},
    {"estimator": "grpo", "group_std": "none"},
    {"estimator": "gdpo", "group_std": "population"},
    {"estimator": "gdpo", "group_std": "none"},
    {"estimator": "grpo", "group_baseline": "leave_one_out"},
    {"estimator": "dr_grpo", "group_baseline": "leave_one_out"},
    {"estimator": "reinforce_pp", "gamma": 0.9},
]


def name_of(variant: dict[str, object]) -> str:
    return "-".join(str(value) for value in variant.values())


def estimator_of(variant: dict[str, object]) -> Estimate:
    return registry.advantage_estimator(AlgorithmSection.model_validate(variant))


def batch(seed: int = 1, *, dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """Three groups of unequal size out of order, a row without a trained token, a row that is not scored."""
    torch.manual_seed(seed)
    index = torch.tensor([0, 2, 1, 1, 2, 0, 2, 0, 1])
    mask = torch.rand(9, 5) < 0.7
    mask[3] = False
    mask[5, 2] = True
    rewards = torch.randn(9, 5, dtype=dtype)
    rewards[5, 2] = torch.nan
    components = torch.randn(9, 2, dtype=dtype)
    components[6, 1] = torch.nan
    baselines = torch.randn(9, dtype=dtype)
    baselines[4] = torch.nan
    return AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        values=torch.randn(9, 5, dtype=dtype),
        group_index=index,
        num_groups=3,
        bootstrap_values=torch.randn(9, dtype=dtype),
        baselines=baselines,
        components=components,
        component_weights=(1.0, 0.5),
    )


def rows(inputs: AdvantageInputs, chosen: slice | Tensor) -> AdvantageInputs:
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[chosen] for name in ROW_FIELDS})


def on_ranks(variant: dict[str, object], parts: list[AdvantageInputs]) -> list[tuple[Tensor, Tensor]]:
    """Results of every rank of a gang."""
    estimate = estimator_of(variant)

    def one_rank(part: AdvantageInputs, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
        return estimate(part, sum_over_ranks)

    if variant["estimator"] in ALONE or variant.get("whiten_advantages") is False:
        return [estimate(part, lambda local: local) for part in parts]
    return run_gang(parts, one_rank)


def drawn_batch(data: st.DataObject) -> AdvantageInputs:
    """Any shape, any mask, groups of any size, any scores missing; few values, so that groups without spread occur."""
    num_rows, num_tokens, num_groups = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    missing = data.draw(st.sampled_from([0.0, 0.3]))

    def scores(*shape: int) -> Tensor:
        values = torch.randint(0, 3, shape, generator=generator).double() / 3
        return torch.where(torch.rand(shape, generator=generator) < missing, torch.nan, values)

    return AdvantageInputs(
        rewards=scores(num_rows, num_tokens),
        response_mask=torch.rand(num_rows, num_tokens, generator=generator) < data.draw(st.sampled_from([0.3, 0.8, 1.1])),
        values=torch.randn(num_rows, num_tokens, generator=generator, dtype=torch.float64),
        group_index=torch.randint(0, num_groups, (num_rows,), generator=generator),
        num_groups=num_groups,
        bootstrap_values=torch.randn(num_rows, generator=generator, dtype=torch.float64),
        baselines=scores(num_rows),
        components=scores(num_rows, 2),
        component_weights=(1.0, -0.5),
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_estimator_of_any_batch_is_finite_and_does_not_depend_on_the_split(variant: dict[str, object], data: st.DataObject) -> None:
    whole = drawn_batch(data)
    expected = estimator_of(variant)(whole, lambda local: local)
    cut = data.draw(st.integers(0, whole.rewards.shape[0]))
    results = on_ranks(variant, [rows(whole, slice(0, cut)), rows(whole, slice(cut, None))])
    for actual, wanted in zip(zip(*results, strict=True), expected, strict=True):
        assert bool(wanted.isfinite().all())
        assert bool((wanted[~whole.response_mask] == 0).all())
        # A spread that is rounding only would be blown up by the division.
        torch.testing.assert_close(torch.cat(actual), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("cuts", [(4,), (1, 5), (3, 3, 7), (0,)], ids=str)
def test_estimator_does_not_depend_on_the_split_over_ranks(variant: dict[str, object], cuts: tuple[int, ...]) -> None:
    estimate, whole = estimator_of(variant), batch()
    expected = estimate(whole, lambda local: local)
    bounds = [0, *cuts, whole.rewards.shape[0]]
    parts = [rows(whole, slice(low, high)) for low, high in itertools.pairwise(bounds)]

    for actual, wanted in zip(zip(*on_ranks(variant, parts), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(actual), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_estimator_ignores_what_masked_slots_hold(variant: dict[str, object], garbage: float) -> None:
    estimate, clean = estimator_of(variant), batch(2, dtype=torch.float32)
    assert clean.values is not None
    padding = torch.full((9, 3), garbage)
    dirty = dataclasses.replace(
        clean,
        rewards=torch.cat((torch.where(clean.response_mask, clean.rewards, garbage), padding), dim=1),
        values=torch.cat((torch.where(clean.response_mask, clean.values, garbage), padding), dim=1),
        response_mask=torch.cat((clean.response_mask, torch.zeros(9, 3, dtype=torch.bool)), dim=1),
    )
    for before, after in zip(estimate(clean, lambda local: local), estimate(dirty, lambda local: local), strict=True):
        torch.testing.assert_close(after[:, :5], before, rtol=0, atol=0)
        assert bool((after[~dirty.response_mask] == 0).all())
        assert bool(after.isfinite().all())


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_estimator_goes_by_group_index_not_by_position(variant: dict[str, object]) -> None:
    estimate, inputs = estimator_of(variant), batch(3)
    order = torch.tensor([7, 0, 8, 3, 5, 1, 6, 2, 4])
    for before, after in zip(estimate(inputs, lambda x: x), estimate(rows(inputs, order), lambda x: x), strict=True):
        torch.testing.assert_close(after, before[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_row_that_is_not_scored_gets_nothing_and_changes_nothing(variant: dict[str, object]) -> None:
    estimate, inputs = estimator_of(variant), batch(4)
    others = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8])
    advantages, _ = estimate(inputs, lambda x: x)
    without, _ = estimate(rows(inputs, others), lambda x: x)
    assert bool((advantages[5] == 0).all())
    torch.testing.assert_close(advantages[others], without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_estimator_of_nothing_is_empty_and_of_masked_rows_zero(variant: dict[str, object]) -> None:
    estimate, inputs = estimator_of(variant), batch(5)
    nothing, _ = estimate(rows(inputs, slice(0, 0)), lambda x: x)
    assert nothing.shape == (0, 5)
    masked = dataclasses.replace(inputs, response_mask=torch.zeros(9, 5, dtype=torch.bool))
    for result in estimate(masked, lambda x: x):
        assert torch.equal(result, torch.zeros(9, 5, dtype=torch.float64))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_results_carry_no_gradient_and_keep_the_dtype(variant: dict[str, object]) -> None:
    inputs = batch(6, dtype=torch.float32)
    assert inputs.values is not None
    inputs = dataclasses.replace(inputs, rewards=inputs.rewards.requires_grad_(), values=inputs.values.requires_grad_())
    for result in estimator_of(variant)(inputs, lambda x: x):
        assert not result.requires_grad
        assert result.dtype == torch.float32


GROUPED = [variant for variant in VARIANTS if "groups" in ESTIMATORS[str(variant["estimator"])].needs]


@pytest.mark.parametrize("variant", GROUPED, ids=name_of)
def test_group_estimator_without_groups_is_refused(variant: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="group_index"):
        estimator_of(variant)(dataclasses.replace(batch(), group_index=None), lambda x: x)


@pytest.mark.parametrize("variant", GROUPED, ids=name_of)
@pytest.mark.parametrize("score", [0.0, 1.0, 0.35, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exact_zeros(variant: dict[str, object], score: float, dtype: torch.dtype) -> None:
    lengths = torch.tensor([4, 1, 3, 2, 4, 4])
    mask = torch.arange(4) < lengths[:, None]
    rewards = torch.zeros(6, 4, dtype=dtype)
    rewards[torch.arange(6), lengths - 1] = score
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        group_index=torch.tensor([0, 1, 0, 1, 0, 1]),
        num_groups=2,
        components=torch.full((6, 2), score, dtype=dtype),
        component_weights=(1.0, 0.3),
    )
    assert torch.equal(estimator_of(variant)(inputs, lambda x: x)[0], torch.zeros(6, 4, dtype=dtype))
