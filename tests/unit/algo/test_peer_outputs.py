"""The same numbers as verl's own functions, where the conventions agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.advantages import gae
from shoal.algo.aggregation import aggregate, count_trained
from shoal.algo.group_advantages import grpo_advantages, rloo_advantages
from shoal.algo.kl import token_kl
from shoal.algo.logprobs import logits_to_entropy, logits_to_logprobs
from shoal.algo.losses import TokenLoss, ppo_loss, value_loss
from shoal.algo.masking import masked_moments, whiten
from tests.helpers.math_cases import read_json

# verl divides by (count + 1e-8).
RTOL, ATOL = 1e-6, 1e-7


def cases_of(function: str) -> list[dict[str, Any]]:
    return [case for case in read_json("verl-oracles.json")["cases"] if case["fn"] == function]


def name_of(case: dict[str, Any]) -> str:
    return "-".join([case["batch"], *(f"{key}={value}" for key, value in case["params"].items() if key != "note")])


def tensor_of(stored: dict[str, Any]) -> Tensor:
    return torch.tensor(stored["data"], dtype=torch.float64).reshape(stored["shape"])


def inputs_of(case: dict[str, Any]) -> dict[str, Tensor]:
    batch = read_json("verl-oracles.json")["inputs"][case["batch"]]
    return {argument: tensor_of(batch[stored]) for argument, stored in case["inputs"].items()}


def check_gradient(loss: Tensor, variable: Tensor, stored: dict[str, Any]) -> None:
    (gradient,) = torch.autograd.grad(loss, variable)
    torch.testing.assert_close(gradient, tensor_of(stored), rtol=RTOL, atol=ATOL)


def token_loss(loss: TokenLoss | Tensor, mask: Tensor, mode: str) -> Tensor:
    per_token = loss.per_token if isinstance(loss, TokenLoss) else loss
    return aggregate(per_token, mask, count_trained([mask]), loss_aggregation=mode.replace("-", "_"))


@pytest.mark.parametrize("case", cases_of("gae"), ids=name_of)
def test_whitened_gae_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    settings = {key: case["params"][key] for key in ("gamma", "lam")}
    advantages, returns = gae(inputs["token_level_rewards"], inputs["values"], mask, **settings)
    whitened = whiten(advantages, mask, masked_moments(advantages, mask), ddof=1)
    # verl fills masked slots with what the loop carried; only trained tokens are defined.
    torch.testing.assert_close(whitened[mask], tensor_of(case["outputs"]["advantages"])[mask], rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(returns[mask], tensor_of(case["outputs"]["returns"])[mask], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("case", cases_of("grpo") + cases_of("rloo"), ids=name_of)
def test_group_advantages_equal_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    scores, index = inputs["token_level_rewards"].sum(dim=1), inputs["index"].long()
    num_groups = int(index.max()) + 1
    if case["fn"] == "rloo":
        advantages = rloo_advantages(scores, index, num_groups)
    else:
        group_std = "sample" if case["params"]["norm_adv_by_std_in_grpo"] else "none"
        advantages = grpo_advantages(scores, index, num_groups, group_std=group_std)
    # A group of one has its own score as advantage there; here it has none, and is refused at start.
    compared = mask & (torch.bincount(index)[index] > 1)[:, None]
    expected = tensor_of(case["outputs"]["advantages"])
    torch.testing.assert_close(advantages[:, None].expand(mask.shape)[compared], expected[compared], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases_of("kl_penalty"), ids=name_of)
def test_kl_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    logprobs = inputs["logprob"].requires_grad_()
    kl = token_kl(logprobs, inputs["ref_logprob"], mask, kl_estimator=case["params"]["kl_penalty"])
    torch.testing.assert_close(kl[mask], tensor_of(case["outputs"]["kl"])[mask], rtol=RTOL, atol=ATOL)
    check_gradient(token_loss(kl, mask, "token-mean"), logprobs, case["outputs"]["grad_logprob"])


@pytest.mark.parametrize("case", cases_of("policy_loss/vanilla"), ids=name_of)
def test_ppo_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    logprobs, params = inputs["log_prob"].requires_grad_(), case["params"]
    loss = ppo_loss(
        logprobs,
        inputs["old_log_prob"],
        inputs["advantages"],
        mask,
        clip_low=params["clip_ratio_low"],
        clip_high=params["clip_ratio_high"],
        dual_clip=params["clip_ratio_c"],
    )
    if "rollout_is_weights" in inputs:
        loss = TokenLoss(per_token=loss.per_token * inputs["rollout_is_weights"])
    total = token_loss(loss, mask, params["loss_agg_mode"])
    assert float(total) == pytest.approx(case["outputs"]["loss"], rel=1e-6, abs=1e-7)
    check_gradient(total, logprobs, case["outputs"]["grad_log_prob"])
    if loss.sums:
        count = float(mask.sum())
        assert float(loss.sums["clip_fraction"]) / count == pytest.approx(case["outputs"]["pg_clipfrac"], rel=1e-6)
        assert float(loss.sums["clip_fraction_lower"]) / count == pytest.approx(case["outputs"]["pg_clipfrac_lower"], rel=1e-6)


@pytest.mark.parametrize("case", cases_of("value_loss"), ids=name_of)
def test_value_loss_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    values, params = inputs["vpreds"].requires_grad_(), case["params"]
    loss = value_loss(values, inputs["values"], inputs["returns"], mask, value_clip=params["cliprange_value"])
    total = token_loss(loss, mask, params["loss_agg_mode"])
    assert float(total) == pytest.approx(case["outputs"]["loss"], rel=1e-6)
    check_gradient(total, values, case["outputs"]["grad_vpreds"])


@pytest.mark.parametrize("case", cases_of("agg_loss"), ids=name_of)
def test_aggregation_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["loss_mask"].bool()
    losses = inputs["loss_mat"].requires_grad_()
    total = token_loss(losses, mask, case["params"]["loss_agg_mode"])
    assert float(total) == pytest.approx(case["outputs"]["loss"], rel=1e-6, abs=1e-7)
    check_gradient(total, losses, case["outputs"]["grad_loss_mat"])


DENSE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "entropy_from_logits": (lambda inputs: logits_to_entropy(inputs["logits"]), "entropy"),
    "logprobs_from_logits": (lambda inputs: logits_to_logprobs(inputs["logits"], inputs["labels"].long()), "logprobs"),
}


@pytest.mark.parametrize("case", [case for name in DENSE for case in cases_of(name)], ids=lambda case: f"{case['fn']}-{case['batch']}")
def test_logprobs_and_entropy_equal_verl(case: dict[str, Any]) -> None:
    function, output = DENSE[case["fn"]]
    torch.testing.assert_close(function(inputs_of(case)), tensor_of(case["outputs"][output]), rtol=1e-10, atol=1e-10)
