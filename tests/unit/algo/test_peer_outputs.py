"""The same advantages, KL, aggregations, corrections and entropies as verl's own functions, where the conventions agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs, gae, reinforce_pp_estimator, remax_estimator
from shoal.algo.aggregation import TrainedCounts, aggregate, count_trained
from shoal.algo.group_advantages import dr_grpo_estimator, grpo_estimator, reinforce_pp_baseline_estimator, rloo_estimator
from shoal.algo.kl import token_kl
from shoal.algo.logprobs import logits_to_entropy, logits_to_logprobs, token_logprobs
from shoal.algo.masking import masked_moments, whiten
from shoal.algo.offpolicy import importance_weights, kept_sequences
from shoal.algo.rewards import penalised_rewards
from shoal.algo.steering import adapted_kl_coef
from tests.helpers.peer_cases import (
    ATOL,
    RTOL,
    aggregated,
    check_loss,
    check_tokens,
    functions_of,
    inputs_of,
    name_of,
    tensor_of,
    verl_cases,
)

NOT_COMPARED = {
    "grpo_passk": "pass@k advantages are not offered",
    "opo": "OPO's length-weighted baseline is not offered",
    "gpg": "GPG's estimator rescales by the share of groups with spread; not offered (its loss is `reinforce`)",
    "kl_penalty/abs": "|k1| is no estimator of the KL",
    "kl_penalty/k1+": "value of k1 with the gradient of k2; k3_straight_through has the same gradient and a value of one sign",
    "agg_loss/token-sum": "depends on the size of the batch; not offered",
    "policy_loss/sapo": "not offered",
    "policy_loss/geo_mean": "GMPO is not offered",
    "policy_loss/dppo_tv": "not offered",
    "policy_loss/dppo_kl": "not offered",
    "policy_loss/dro": "not offered",
    "rollout_is_weights/batch_normalize": "dividing by the mean weight makes the loss depend on the split; not offered",
    "rollout_rejection_mask/token_k1": "single tokens are dropped by importance_weights token_mask",
    "rollout_rejection_mask/token_k3": "bounds on k3 are not offered",
    "rollout_rejection_mask/seq_mean_k3": "bounds on k3 are not offered",
    "rollout_rejection_mask/seq_max_k3": "bounds on k3 are not offered",
}
IN_OTHER_FILES = {"policy_loss/vanilla", "policy_loss/gspo", "policy_loss/cispo", "policy_loss/gpg", "value_loss"}
COMPARED = {
    *("gae", "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
    *("kl_penalty/k1", "kl_penalty/k2", "kl_penalty/k3", "kl_penalty/k3+", "compute_rewards", "adaptive_kl"),
    *("agg_loss/token-mean", "agg_loss/seq-mean-token-mean", "agg_loss/seq-mean-token-sum", "agg_loss/seq-mean-token-sum-norm"),
    *("masked_whiten", "masked_mean_var", "entropy_loss", "entropy_from_logits", "logprobs_from_logits"),
    *("rollout_is_weights/token", "rollout_is_weights/sequence"),
    *("rollout_rejection_mask/seq_sum_k1", "rollout_rejection_mask/seq_mean_k1"),
}


def test_every_function_of_verls_is_compared_or_has_a_reason() -> None:
    assert functions_of("verl-oracles.json") == COMPARED | IN_OTHER_FILES | set(NOT_COMPARED)


def advantage_inputs(inputs: dict[str, Tensor]) -> AdvantageInputs:
    index = inputs["index"].long() if "index" in inputs else None
    return AdvantageInputs(
        rewards=inputs["token_level_rewards"],
        response_mask=inputs["response_mask"].bool(),
        values=inputs.get("values"),
        group_index=index,
        num_groups=0 if index is None else int(index.max()) + 1,
        baselines=inputs.get("reward_baselines"),
    )


@pytest.mark.parametrize("case", verl_cases("gae"), ids=name_of)
def test_whitened_gae_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    advantages, returns = gae(inputs["token_level_rewards"], inputs["values"], mask, **case["params"])
    check_tokens(whiten(advantages, mask, masked_moments(advantages, mask), ddof=1), case["outputs"]["advantages"], mask)
    check_tokens(returns, case["outputs"]["returns"], mask)


@pytest.mark.parametrize("case", [*verl_cases("grpo"), *verl_cases("grpo_vectorized")], ids=name_of)
def test_grpo_equals_verl(case: dict[str, Any]) -> None:
    inputs = advantage_inputs(inputs_of(case))
    estimate = grpo_estimator if case["params"]["norm_adv_by_std_in_grpo"] else dr_grpo_estimator
    check_group_advantages(estimate(inputs)[0], inputs, case)


@pytest.mark.parametrize("case", [*verl_cases("rloo"), *verl_cases("rloo_vectorized")], ids=name_of)
def test_rloo_equals_verl(case: dict[str, Any]) -> None:
    inputs = advantage_inputs(inputs_of(case))
    check_group_advantages(rloo_estimator(inputs)[0], inputs, case)


def check_group_advantages(advantages: Tensor, inputs: AdvantageInputs, case: dict[str, Any]) -> None:
    """A group of one has its own score as advantage there; here it has none, and is refused at start."""
    assert inputs.group_index is not None
    scored = inputs.response_mask.any(dim=1)
    # A row without a trained token has score 0 there; here it is not scored.
    complete = torch.tensor([bool(scored[inputs.group_index == group].all()) for group in inputs.group_index])
    compared = inputs.response_mask & ((torch.bincount(inputs.group_index)[inputs.group_index] > 1) & complete)[:, None]
    assert bool(compared.any())
    torch.testing.assert_close(advantages[compared], tensor_of(case["outputs"]["advantages"])[compared], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", ["plain", "large"])
def test_reinforce_pp_baseline_equals_verl(batch: str) -> None:
    # The batch with holes has a group of one and a row without a trained token, see `check_group_advantages`; both move the whitening.
    (case,) = (case for case in verl_cases("reinforce_plus_plus_baseline") if case["batch"] == batch)
    inputs = advantage_inputs(inputs_of(case))
    check_tokens(reinforce_pp_baseline_estimator(inputs)[0], case["outputs"]["advantages"], inputs.response_mask)


@pytest.mark.parametrize("case", verl_cases("reinforce_plus_plus"), ids=name_of)
def test_reinforce_pp_equals_verl(case: dict[str, Any]) -> None:
    inputs = advantage_inputs(inputs_of(case))
    advantages, returns = reinforce_pp_estimator(inputs, gamma=case["params"]["gamma"])
    check_tokens(returns, case["outputs"]["returns"], inputs.response_mask)
    # The variance is the population's here, the sample's there.
    count = float(inputs.response_mask.sum())
    check_tokens(advantages * ((count - 1) / count) ** 0.5, case["outputs"]["advantages"], inputs.response_mask)


@pytest.mark.parametrize("case", verl_cases("remax"), ids=name_of)
def test_remax_equals_verl(case: dict[str, Any]) -> None:
    inputs = advantage_inputs(inputs_of(case))
    advantages, returns = remax_estimator(inputs)
    check_tokens(advantages, case["outputs"]["advantages"], inputs.response_mask)
    check_tokens(returns, case["outputs"]["returns"], inputs.response_mask)


KL_NAMES = {"k1": "k1", "k2": "k2", "k3": "k3", "k3+": "k3_straight_through"}


@pytest.mark.parametrize("case", [case for name in KL_NAMES for case in verl_cases("kl_penalty", kl_penalty=name)], ids=name_of)
def test_kl_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    logprobs = inputs["logprob"].requires_grad_()
    name = KL_NAMES[case["params"]["kl_penalty"]]
    kl = token_kl(logprobs, inputs["ref_logprob"], mask, kl_estimator=name)
    if name.startswith("k3"):
        # verl cuts the value of k3 at 10, and with it the gradient, except that of the straight-through variant.
        bounded = kl.clamp(max=10.0)
        kl = bounded if name == "k3" else bounded.detach() + kl - kl.detach()
    check_tokens(kl.detach(), case["outputs"]["kl"], mask)
    check_loss(aggregated(kl, mask, "token-mean"), case["outputs"]["loss"], logprobs, tensor_of(case["outputs"]["grad_logprob"]))


@pytest.mark.parametrize("case", verl_cases("compute_rewards"), ids=name_of)
def test_penalised_rewards_equal_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of({**case, "inputs": {"mask": "response_mask"}})["mask"].bool()
    scores, kl_coef = (inputs["token_level_scores"] * mask).sum(dim=1), case["params"]["kl_ratio"]
    rewards, _ = penalised_rewards(scores, inputs["old_log_prob"], inputs["ref_log_prob"], mask, kl_coef=kl_coef)
    check_tokens(rewards, case["outputs"]["rewards"], mask)


def test_adaptive_kl_equals_verl() -> None:
    (case,) = verl_cases("adaptive_kl")
    kl_coef, params = case["params"]["init"], case["params"]
    for step in case["outputs"]["trace"]:
        kl_coef = adapted_kl_coef(
            kl_coef, current_kl=step["current_kl"], target_kl=params["target"], num_samples=step["n_steps"], horizon=params["horizon"]
        )
        assert kl_coef == pytest.approx(step["value"], rel=1e-9)


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("case", [case for mode in AGGREGATIONS for case in verl_cases("agg_loss", loss_agg_mode=mode)], ids=name_of)
def test_aggregation_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask, params = inputs_of(case), inputs_of(case)["loss_mask"].bool(), case["params"]
    counts = count_trained([mask])
    if "batch_num_tokens" in params:
        counts = TrainedCounts(num_tokens=params["batch_num_tokens"], num_sequences=params["global_batch_size"])
    losses, mode = inputs["loss_mat"].requires_grad_(), params["loss_agg_mode"].replace("-", "_")
    norm_length = params.get("loss_scale_factor", mask.shape[1])
    # verl multiplies by the number of ranks for a framework that averages gradients.
    total = params.get("dp_size", 1) * aggregate(losses, mask, counts, loss_aggregation=mode, norm_length=norm_length)
    check_loss(total, case["outputs"]["loss"], losses, tensor_of(case["outputs"]["grad_loss_mat"]))


@pytest.mark.parametrize("case", verl_cases("masked_whiten"), ids=name_of)
def test_whitening_equals_verl(case: dict[str, Any]) -> None:
    values, mask = inputs_of(case)["values"], inputs_of(case)["mask"].bool()
    whitened = whiten(values, mask, masked_moments(values, mask), shift_mean=case["params"]["shift_mean"], ddof=1)
    check_tokens(whitened, case["outputs"]["whitened"], mask)


@pytest.mark.parametrize("case", verl_cases("masked_mean_var"), ids=name_of)
def test_moments_equal_verl(case: dict[str, Any]) -> None:
    moments = masked_moments(inputs_of(case)["values"], inputs_of(case)["mask"].bool())
    assert float(moments.mean) == pytest.approx(case["outputs"]["mean"], rel=RTOL)
    assert float(moments.variance(1)) == pytest.approx(case["outputs"]["var"], rel=RTOL)


@pytest.mark.parametrize("case", verl_cases("entropy_loss"), ids=name_of)
def test_entropy_and_its_gradient_equal_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    logits = inputs["logits"].requires_grad_()
    total = aggregated(logits_to_entropy(logits), mask, case["params"]["loss_agg_mode"])
    check_loss(total, case["outputs"]["loss"], logits, tensor_of(case["outputs"]["grad_logits"]))


@pytest.mark.parametrize("case", verl_cases("entropy_loss"), ids=name_of)
def test_chunked_entropy_and_its_gradient_equal_verl(case: dict[str, Any]) -> None:
    inputs, mask = inputs_of(case), inputs_of(case)["response_mask"].bool()
    # With the identity as head, hidden states are logits.
    logits = inputs["logits"].requires_grad_()
    head = torch.eye(logits.shape[-1], dtype=torch.float64)
    _, entropies = token_logprobs(logits[mask], head, torch.zeros(int(mask.sum()), dtype=torch.long), chunk_elements=20)
    check_loss(entropies.mean(), case["outputs"]["loss"], logits, tensor_of(case["outputs"]["grad_logits"]))


DENSE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "entropy_from_logits": (lambda inputs: logits_to_entropy(inputs["logits"]), "entropy"),
    "logprobs_from_logits": (lambda inputs: logits_to_logprobs(inputs["logits"], inputs["labels"].long()), "logprobs"),
}


@pytest.mark.parametrize("case", [case for name in DENSE for case in verl_cases(name)], ids=lambda case: f"{case['fn']}-{case['batch']}")
def test_logprobs_and_entropy_equal_verl(case: dict[str, Any]) -> None:
    function, output = DENSE[case["fn"]]
    torch.testing.assert_close(function(inputs_of(case)), tensor_of(case["outputs"][output]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", verl_cases("rollout_is_weights", batch_normalize=False), ids=name_of)
def test_importance_weights_equal_verl(case: dict[str, Any]) -> None:
    inputs, mask, params = inputs_of(case), inputs_of(case)["response_mask"].bool(), case["params"]
    is_mask = isinstance(params["threshold"], str)
    low, high = map(float, params["threshold"].split("_")) if is_mask else (0.0, params["threshold"])
    weights = importance_weights(
        inputs["old_log_prob"],
        inputs["rollout_log_prob"],
        mask,
        importance_weights=f"{params['level']}_{'mask' if is_mask else 'truncate'}",
        importance_low=low,
        importance_high=high,
    )
    torch.testing.assert_close(weights, tensor_of(case["outputs"]["weights"]), rtol=RTOL, atol=ATOL)


REJECTIONS = {"seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


@pytest.mark.parametrize("case", [case for mode in REJECTIONS for case in verl_cases("rollout_rejection_mask", mode=mode)], ids=name_of)
def test_rejection_equals_verl(case: dict[str, Any]) -> None:
    inputs, mask, params = inputs_of(case), inputs_of(case)["response_mask"].bool(), case["params"]
    low, high = map(float, params["threshold"].split("_"))
    kept = kept_sequences(
        inputs["old_log_prob"],
        inputs["rollout_log_prob"],
        mask,
        rejection=REJECTIONS[params["mode"]],
        # verl holds engine / trainer against the bounds, here it is trainer / engine.
        rejection_low=1 / high,
        rejection_high=1 / low,
    )
    assert torch.equal(mask & kept[:, None], tensor_of(case["outputs"]["mask"]).bool())
