"""The same losses, gradients and fractions as verl's own loss functions, where the conventions agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.losses import TokenLoss, cispo_loss, gspo_loss, ppo_loss, reinforce_loss, value_loss
from tests.helpers.peer_cases import RTOL, aggregated, check_loss, inputs_of, name_of, tensor_of, verl_cases


def policy_inputs(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = inputs_of(case)
    mask = inputs["response_mask"].bool()
    return inputs["log_prob"].requires_grad_(), inputs["old_log_prob"], inputs["advantages"], mask


def check_policy_loss(terms: TokenLoss, case: dict[str, Any], logprobs: Tensor, mask: Tensor, *, mode: str | None = None) -> None:
    """Loss, gradient and fractions; importance weights multiply the terms where the case has them."""
    inputs, outputs = inputs_of(case), case["outputs"]
    per_token = terms.per_token * inputs["rollout_is_weights"] if "rollout_is_weights" in inputs else terms.per_token
    total = aggregated(per_token, mask, mode or case["params"]["loss_agg_mode"], mask.shape[1])
    check_loss(total, outputs["loss"], logprobs, tensor_of(outputs["grad_log_prob"]))
    fractions = {"clip_fraction": "pg_clipfrac", "clip_fraction_lower": "pg_clipfrac_lower"}
    for ours, theirs in fractions.items():
        if theirs in outputs and ours in terms.sums:
            assert float(terms.sums[ours]) / float(mask.sum()) == pytest.approx(outputs[theirs], rel=RTOL)
    # verl bounds every log-ratio to 20 first.
    if "ppo_kl" in outputs and case["batch"] != "large":
        assert float(terms.sums["approx_kl"]) / float(mask.sum()) == pytest.approx(outputs["ppo_kl"], rel=RTOL)


@pytest.mark.parametrize("case", verl_cases("policy_loss/vanilla"), ids=name_of)
def test_ppo_equals_verl(case: dict[str, Any]) -> None:
    logprobs, old, advantages, mask = policy_inputs(case)
    params = case["params"]
    low, high, dual = params["clip_ratio_low"], params["clip_ratio_high"], params["clip_ratio_c"]
    check_policy_loss(ppo_loss(logprobs, old, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual), case, logprobs, mask)


# verl cuts the log-ratio of a sequence at 10, and with it the gradient, which the batch with large ratios shows; TRL does not, see
# test_peer_trl.py.
@pytest.mark.parametrize("case", [case for case in verl_cases("policy_loss/gspo") if case["batch"] != "large"], ids=name_of)
def test_gspo_equals_verl(case: dict[str, Any]) -> None:
    logprobs, old, advantages, mask = policy_inputs(case)
    low, high = case["params"]["clip_ratio_low"], case["params"]["clip_ratio_high"]
    terms = gspo_loss(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
    check_policy_loss(terms, case, logprobs, mask)


@pytest.mark.parametrize("case", verl_cases("policy_loss/cispo"), ids=name_of)
def test_cispo_equals_verl(case: dict[str, Any]) -> None:
    logprobs, old, advantages, mask = policy_inputs(case)
    low, high = case["params"]["clip_ratio_low"], case["params"]["clip_ratio_high"]
    terms = cispo_loss(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
    check_policy_loss(terms, case, logprobs, mask)


@pytest.mark.parametrize("case", verl_cases("policy_loss/gpg"), ids=name_of)
def test_reinforce_equals_verls_gpg_loss(case: dict[str, Any]) -> None:
    logprobs, old, advantages, mask = policy_inputs(case)
    check_policy_loss(reinforce_loss(logprobs, old, advantages, mask), case, logprobs, mask)


@pytest.mark.parametrize("case", verl_cases("value_loss"), ids=name_of)
def test_value_loss_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    values, params = inputs["vpreds"].requires_grad_(), case["params"]
    terms = value_loss(values, inputs["values"], inputs["returns"], mask, value_clip=params["cliprange_value"])
    total = aggregated(terms.per_token, mask, params["loss_agg_mode"])
    check_loss(total, case["outputs"]["loss"], values, tensor_of(case["outputs"]["grad_vpreds"]))
    assert float(terms.sums["value_clip_fraction"]) / float(mask.sum()) == pytest.approx(case["outputs"]["clipfrac"], rel=RTOL)


def test_losses_are_compared_on_ratios_that_overflow_float32_too() -> None:
    (case, *_) = (case for case in verl_cases("policy_loss/vanilla") if case["batch"] == "large")
    logprobs, old, _, mask = policy_inputs(case)
    assert float(torch.where(mask, logprobs.detach() - old, 0.0).max()) == pytest.approx(30.0)
