"""Placing scores and penalties on tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.algo.masking import SumOverRanks
from shoal.algo.rewards import outcome_rewards, overlong_penalty, penalised_rewards, response_mask_of, shaped_scores
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers
from tests.helpers.simulated_gang import run_gang


def test_rewards_use_reported_lengths_when_pad_equals_eos() -> None:
    case = math_case("M-REW-01")
    inputs = case["inputs"]
    mask = response_mask_of(torch.tensor(inputs["response_length"]), 5)
    assert torch.equal(mask, mask_of(case["expected"]["mask"]))
    rewards, kl = penalised_rewards(
        numbers(inputs["score"]), numbers(inputs["logprobs"]), numbers(inputs["ref_logprobs"]), mask, kl_coef=inputs["kl_coef"]
    )
    assert_close(rewards, case["expected"]["token_rewards"])
    assert bool((kl[~mask] == 0).all())


def test_outcome_lands_on_the_last_trained_token_of_a_mask_with_holes() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    rewards = outcome_rewards(torch.tensor([2.0, float("nan")]), mask)
    assert rewards.tolist() == [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_penalised_rewards_carry_no_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rewards, kl = penalised_rewards(torch.ones(1), logprobs, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), kl_coef=0.1)
    assert not rewards.requires_grad
    assert not kl.requires_grad


def test_overlong_penalty_equals_given_numbers() -> None:
    case = math_case("M-REW-03")
    inputs = case["inputs"]
    penalty = overlong_penalty(torch.tensor(inputs["length"]), max_length=inputs["max_len"], buffer=inputs["buffer"])
    assert_close(penalty, case["expected"]["penalty"])


def shaped(scores: object, lengths: list[int], **changes: object) -> Tensor:
    settings: dict[str, object] = {
        "clip": None,
        "normalise": "none",
        "overlong_buffer_tokens": 0,
        "overlong_penalty": 1.0,
        "max_new_tokens": 20,
    }
    return shaped_scores(numbers(scores), torch.tensor(lengths), **(settings | changes))  # type: ignore[arg-type]


def test_scores_without_shaping_stay_as_they_are() -> None:
    assert_close(shaped([1.5, "nan", -3.0], [5, 20, 20]), [1.5, "nan", -3.0], equal_nan=True)


def test_overlong_shaping_of_scores_equals_given_numbers() -> None:
    case = math_case("M-REW-03")
    inputs = case["inputs"]
    result = shaped(
        [1.0] * 6,
        inputs["length"],
        overlong_buffer_tokens=inputs["buffer"],
        max_new_tokens=inputs["max_len"],
        overlong_penalty=0.5,
    )
    assert_close(result, [1.0 + 0.5 * penalty for penalty in case["expected"]["penalty"]])


def test_scores_are_clipped_then_penalised_then_normalised() -> None:
    result = shaped([9.0, 0.5, "nan"], [20, 10, 20], clip=(-1.0, 2.0), overlong_buffer_tokens=4)
    assert_close(result, [1.0, 0.5, "nan"], equal_nan=True)
    result = shaped([9.0, 0.5, "nan"], [20, 10, 20], clip=(-1.0, 2.0), overlong_buffer_tokens=4, normalise="batch")
    std = (0.0625 + 1e-8) ** 0.5
    assert_close(result, [0.25 / std, -0.25 / std, "nan"], equal_nan=True)


@pytest.mark.parametrize("score", [0.0, 1.0, 0.35])
def test_normalised_equal_scores_are_zero(score: float) -> None:
    assert shaped([score] * 3, [1, 2, 3], normalise="batch").tolist() == [0.0, 0.0, 0.0]


def test_normalisation_is_over_the_scored_responses_of_all_ranks() -> None:
    scores = numbers([1.0, "nan", 4.0, -2.0, 0.5])
    whole = shaped(scores.tolist(), [1] * 5, normalise="batch")

    def one_rank(part: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
        return shaped_scores(
            part,
            torch.ones_like(part),
            sum_over_ranks,
            clip=None,
            normalise="batch",
            overlong_buffer_tokens=0,
            overlong_penalty=1.0,
            max_new_tokens=20,
        )

    results = run_gang([scores[:2], scores[2:2], scores[2:]], one_rank)
    assert_close(torch.cat(results), whole.tolist(), equal_nan=True)


def test_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.normalise is 'group'; use one of batch, none"):
        shaped([1.0], [1], normalise="group")


def test_overlong_penalty_needs_a_buffer() -> None:
    with pytest.raises(ValueError, match="buffer is 0"):
        overlong_penalty(torch.tensor([1]), max_length=4, buffer=0)
