"""Families of rewards per token, the KL to the reference, and its controller."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.algo.kl import KL_ESTIMATORS, token_kl
from shoal.algo.rewards import outcome_rewards, penalised_rewards, response_mask_of, shaped_scores
from shoal.algo.steering import adapted_kl_coef
from shoal.cases.family import Compute, Family
from shoal.cases.inputs import Inputs, check_keys
from shoal.errors import DataError


def _response_mask(inputs: Inputs) -> Tensor:
    """[B, T] from the reported lengths; the ids say only how wide the batch is."""
    ids = inputs.integers("response_ids")
    if ids.ndim != 2:
        raise DataError(f"inputs.response_ids has {ids.ndim} levels; give a list of rows")
    for name in ("eos_token_id", "pad_token_id"):
        if inputs.has(name):
            inputs.integer(name)
    num_rows, num_tokens = ids.shape
    lengths = inputs.integers("response_length")
    if lengths.shape != (num_rows,) or not bool(((lengths >= 0) & (lengths <= num_tokens)).all()):
        given = lengths.tolist()
        raise DataError(f"inputs.response_length is {given}; it needs one length in [0, {num_tokens}] for each of {num_rows} rows")
    return response_mask_of(lengths, num_tokens)


def _token_rewards(inputs: Inputs) -> Tensor:
    mask = _response_mask(inputs)
    scores = inputs.vector("score", len(mask))
    if not (inputs.has("logprobs") or inputs.has("ref_logprobs")):
        return outcome_rewards(scores, mask)
    logprobs, ref_logprobs = inputs.rows("logprobs"), inputs.rows("ref_logprobs")
    kl_estimator = inputs.choice("kl_estimator", KL_ESTIMATORS, "k1")
    rewards, _ = penalised_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=inputs.number("kl_coef", 0.0), kl_estimator=kl_estimator)
    return rewards


TOKEN_REWARDS = Family(
    required=("response_ids", "response_length", "score"),
    optional=("eos_token_id", "pad_token_id", "logprobs", "ref_logprobs", "kl_coef", "kl_estimator"),
    outputs={"mask": _response_mask, "token_rewards": _token_rewards},
)


def _overlong(inputs: Inputs) -> Tensor:
    """What a response of reward 0 gets."""
    lengths, buffer = inputs.integers("length"), inputs.integer("buffer")
    if buffer < 0 or bool((lengths < 0).any()):
        raise DataError(f"inputs.length is {lengths.tolist()} and inputs.buffer {buffer}; they count tokens")
    return shaped_scores(
        torch.zeros(lengths.shape, dtype=inputs.dtype),
        lengths,
        clip=None,
        normalise="none",
        overlong_buffer_tokens=buffer,
        overlong_penalty=1.0,
        max_new_tokens=inputs.integer("max_len"),
    )


OVERLONG_SHAPING = Family(required=("length", "max_len", "buffer"), outputs={"penalty": _overlong})


def _kl(inputs: Inputs, name: str) -> tuple[Tensor, Tensor]:
    """The estimate of every token, and the log-probabilities as a leaf."""
    logprobs = inputs.rows("logprobs").requires_grad_()
    mask = inputs.mask(like=logprobs)
    return token_kl(logprobs, inputs.rows("ref_logprobs"), mask, kl_estimator=name), logprobs


def _shaped(tensor: Tensor, inputs: Inputs) -> Tensor:
    return tensor.detach().reshape(inputs.tensor("logprobs").shape)


def _estimate(name: str) -> Compute:
    return lambda inputs: _shaped(_kl(inputs, name)[0], inputs)


def _gradient(name: str) -> Compute:
    def compute(inputs: Inputs) -> Tensor:
        kl, logprobs = _kl(inputs, name)
        return _shaped(torch.autograd.grad(kl.sum(), logprobs)[0], inputs)

    return compute


def _expectation(name: str) -> Compute:
    """Of an estimator over samples of the policy; ids that are never sampled do not count."""

    def compute(inputs: Inputs) -> Tensor:
        policy, reference = inputs.rows("policy"), inputs.rows("ref")
        if not all(bool(((p >= 0) & (p <= 1)).all()) for p in (policy, reference)):
            raise DataError("inputs.policy and inputs.ref hold other numbers than probabilities")
        kl = token_kl(policy.log(), reference.log(), policy > 0, kl_estimator=name)
        return torch.where(policy > 0, policy * kl, 0.0).sum()

    return compute


def _kl_outputs(inputs: Inputs) -> Mapping[str, Compute]:
    if inputs.has("policy"):
        check_keys(inputs.values, required=("policy", "ref"), optional=("dtype",), what="input")
        return {"kl_p_q": _expectation("k1"), **{f"E_{name}": _expectation(name) for name in KL_ESTIMATORS}}
    check_keys(inputs.values, required=("logprobs", "ref_logprobs"), optional=("mask", "dtype"), what="input")
    values = {name: _estimate(name) for name in KL_ESTIMATORS}
    return {**values, **{f"grad_{name}": _gradient(name) for name in KL_ESTIMATORS}}


KL = Family(optional=("logprobs", "ref_logprobs", "mask", "policy", "ref"), outputs=_kl_outputs)
"""Of given log-probabilities, or the expectation over a whole distribution."""


def _kl_coefs(inputs: Inputs) -> list[float]:
    target, horizon = inputs.number("target"), inputs.integer("horizon")
    coef = inputs.number("kl_coef")
    coefs: list[float] = []
    for step in inputs.parts("steps", required=("current", "n")):
        coef = adapted_kl_coef(coef, current_kl=step.number("current"), target_kl=target, num_samples=step.integer("n"), horizon=horizon)
        coefs.append(coef)
    return coefs


ADAPTIVE_KL = Family(required=("kl_coef", "target", "horizon", "steps"), outputs={"kl_coef_after": _kl_coefs})
