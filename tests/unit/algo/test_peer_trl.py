"""The same losses and gradients as TRL's GRPO trainer, where the conventions agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.kl import safe_exp, token_kl
from shoal.algo.logprobs import logits_to_entropy, logits_to_logprobs
from shoal.algo.losses import TokenLoss, cispo_loss, gspo_loss, log_ratio_of, ppo_loss
from tests.helpers.peer_cases import aggregated, check_loss, functions_of, inputs_of, name_of, tensor_of, trl_cases

NOT_COMPARED = {
    "grpo_loss/luspo/token": "multiplies by the sequence's length; not offered",
    "grpo_loss/luspo/sequence": "multiplies by the sequence's length; not offered",
    "grpo_loss/sapo/token": "not offered",
    "grpo_loss/sapo/sequence": "not offered",
    "grpo_loss/vespo/token": "not offered",
    "grpo_loss/vespo/sequence": "not offered",
    "grpo_loss/cispo/sequence": "CISPO with the ratio of the sequence is not offered",
    "off_policy_mask": "drops negative responses by their mean log-ratio; not offered",
    "vespo_gamma_weights": "not offered",
}
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}
LOSSES = [f"grpo_loss/{name}/{level}" for name in AGGREGATIONS for level in ("token", "sequence")]


def test_every_function_of_trls_is_compared_or_has_a_reason() -> None:
    compared = {*LOSSES, "selective_log_softmax", "entropy_from_logits"} - set(NOT_COMPARED)
    assert functions_of("trl-oracles.json") == compared | set(NOT_COMPARED)


def loss_of(params: dict[str, Any], logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    low, high = params["epsilon_low"], params["epsilon_high"]
    if params["loss_type"] == "cispo":
        # TRL bounds the weight above only, by epsilon_high itself.
        return cispo_loss(logprobs, old, advantages, mask, clip_low=1.0, clip_high=high - 1.0)
    if params["importance_sampling_level"] == "sequence":
        return gspo_loss(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
    # TRL's delta bounds the ratio where the advantage is negative: the dual clip.
    return ppo_loss(logprobs, old, advantages, mask, clip_low=low, clip_high=high, dual_clip=params["delta"])


def case_id(case: dict[str, Any]) -> str:
    return name_of({**case, "params": {key: value for key, value in case["params"].items() if key != "max_completion_length"}})


@pytest.mark.parametrize("case", [case for name in AGGREGATIONS for case in trl_cases("grpo_loss", loss_type=name)], ids=case_id)
def test_loss_equals_trl(case: dict[str, Any]) -> None:
    inputs, params = inputs_of(case), case["params"]
    mask = inputs["response_mask"].bool()
    logprobs = inputs["log_prob"].requires_grad_()
    advantages = inputs["advantages"][:, :1].expand(mask.shape)
    per_token = loss_of(params, logprobs, inputs["old_log_prob"], advantages, mask).per_token
    if params["beta"]:
        # TRL weighs the KL by the ratio, so that it is unbiased over samples of the old policy.
        ratio = safe_exp(log_ratio_of(logprobs, inputs["old_log_prob"], mask))
        per_token = per_token + params["beta"] * ratio * token_kl(logprobs, inputs["ref_log_prob"], mask, kl_estimator="k3")
    mode = AGGREGATIONS[params["loss_type"]]
    total = aggregated(per_token, mask, mode, params["max_completion_length"])
    if mode.startswith("seq"):
        # TRL's mean over sequences counts those without a trained token.
        total = total * float(mask.any(dim=1).sum()) / mask.shape[0]
    check_loss(total, case["outputs"]["loss"], logprobs, tensor_of(case["outputs"]["grad_log_prob"]))


@pytest.mark.parametrize("case", trl_cases("selective_log_softmax"), ids=name_of)
def test_logprobs_equal_trl(case: dict[str, Any]) -> None:
    inputs = inputs_of(case)
    logprobs = logits_to_logprobs(inputs["logits"], inputs["index"].long())
    torch.testing.assert_close(logprobs, tensor_of(case["outputs"]["logprobs"]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", trl_cases("entropy_from_logits"), ids=name_of)
def test_entropy_equals_trl(case: dict[str, Any]) -> None:
    entropy = logits_to_entropy(inputs_of(case)["logits"])
    torch.testing.assert_close(entropy, tensor_of(case["outputs"]["entropy"]), rtol=1e-10, atol=1e-10)
