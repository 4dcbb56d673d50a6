"""Placing scores and penalties on tokens."""

from __future__ import annotations

import torch

from shoal.algo.rewards import outcome_rewards, overlong_penalty, penalised_rewards, response_mask_of
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers


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
