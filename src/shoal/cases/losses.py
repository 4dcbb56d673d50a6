"""Families of per-token losses, the weights on them, and how they become one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.aggregation import aggregate, count_trained
from shoal.algo.losses import TokenLoss, ppo_loss, value_loss
from shoal.algo.offpolicy import correction_sums, importance_weights
from shoal.cases.family import Compute, Family
from shoal.cases.inputs import Inputs
from shoal.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRun:
    """A loss of [B, T] tokens. leaf: what it is differentiated by. shape: of the case's own lists."""

    loss: TokenLoss
    mask: Tensor
    leaf: Tensor
    shape: torch.Size

    def token_mean(self) -> Tensor:
        """The step's loss where this is the whole step."""
        return aggregate(self.loss.per_token, self.mask, count_trained([self.mask]), loss_aggregation="token_mean")

    def per_token(self) -> Tensor:
        """Every token's loss."""
        return self.loss.per_token.detach().reshape(self.shape)

    def gradient(self, total: Tensor) -> Tensor:
        """Of a scalar by the leaf."""
        return torch.autograd.grad(total, self.leaf)[0].reshape(self.shape)

    def share(self, name: str) -> float:
        """One of the loss's sums over the trained tokens."""
        return float(self.loss.sums[name]) / max(1.0, float(self.mask.sum()))


def exact_log(ratio: Tensor) -> Tensor:
    """The logarithm whose exponential is nearest to a ratio, so that a ratio on the border of the clip range stays on it."""
    candidates = [ratio.log()]
    for direction in (torch.inf, -torch.inf):
        towards = torch.full_like(ratio, direction)
        candidates += [torch.nextafter(candidates[0], towards)]
    stacked = torch.stack(candidates)
    best = (stacked.exp() - ratio).abs().nan_to_num(torch.inf).argmin(dim=0, keepdim=True)
    return stacked.gather(0, best)[0]


def _ppo(inputs: Inputs) -> LossRun:
    if inputs.has("ratio") == inputs.has("log_ratio"):
        raise DataError("inputs must hold either ratio or log_ratio")
    key = "ratio" if inputs.has("ratio") else "log_ratio"
    log_ratio = exact_log(inputs.rows(key)) if key == "ratio" else inputs.rows(key)
    logprobs = log_ratio.requires_grad_()
    mask = inputs.mask(like=logprobs)
    loss = ppo_loss(
        logprobs,
        torch.zeros_like(logprobs),
        inputs.rows("advantages"),
        mask,
        clip_low=inputs.number("clip_low"),
        clip_high=inputs.number("clip_high"),
        dual_clip=inputs.number("dual_clip_c") if inputs.has("dual_clip_c") else None,
    )
    return LossRun(loss=loss, mask=mask, leaf=logprobs, shape=inputs.tensor(key).shape)


def _of_ppo(read: Callable[[LossRun], object]) -> Compute:
    return lambda inputs: read(_ppo(inputs))


PPO_CLIP = Family(
    required=("advantages", "clip_low", "clip_high"),
    optional=("ratio", "log_ratio", "mask", "dual_clip_c"),
    outputs={
        "per_token_loss": _of_ppo(LossRun.per_token),
        "grad_logp_per_token": _of_ppo(lambda run: run.gradient(run.loss.per_token.sum())),
        "token_mean": _of_ppo(lambda run: run.token_mean().detach()),
        "grad_token_mean": _of_ppo(lambda run: run.gradient(run.token_mean())),
        "clipfrac": _of_ppo(lambda run: run.share("clip_fraction")),
        "clipfrac_lower": _of_ppo(lambda run: run.share("clip_fraction_lower")),
        "approx_kl_k1": _of_ppo(lambda run: run.share("approx_kl")),
    },
)
"""approx_kl_k1 is the mean of old - new, the k1 estimate of KL(old || new) from samples of the old policy."""


def _value(inputs: Inputs) -> LossRun:
    values = inputs.rows("values").requires_grad_()
    mask = inputs.mask(like=values)
    value_clip = inputs.number("clip_range") if inputs.has("clip_range") else None
    loss = value_loss(values, inputs.rows("old_values"), inputs.rows("returns"), mask, value_clip=value_clip)
    return LossRun(loss=loss, mask=mask, leaf=values, shape=inputs.tensor("values").shape)


VALUE_LOSS = Family(
    required=("values", "old_values", "returns"),
    optional=("mask", "clip_range"),
    outputs={
        "per_token": lambda inputs: _value(inputs).per_token(),
        "token_mean": lambda inputs: _value(inputs).token_mean().detach(),
        "clipfrac": lambda inputs: _value(inputs).share("value_clip_fraction"),
    },
)


def _bounds(inputs: Inputs) -> tuple[str, float, float]:
    """Mode, lower and upper bound: truncated where the case gives a cap, masked where it gives two bounds."""
    if inputs.has("cap") == (inputs.has("low") or inputs.has("high")):
        raise DataError("inputs must hold either cap, or low and high")
    if inputs.has("cap"):
        return "token_truncate", 0.0, inputs.number("cap")
    return "token_mask", inputs.number("low"), inputs.number("high")


def _engine_pair(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] log-probabilities of trainer and engine, and the mask."""
    old = inputs.rows("train_old_logprobs")
    return old, inputs.rows("rollout_logprobs"), inputs.mask(like=old)


def _weights(inputs: Inputs) -> Tensor:
    mode, low, high = _bounds(inputs)
    return importance_weights(*_engine_pair(inputs), importance_weights=mode, importance_low=low, importance_high=high)


def _weighted_token_mean(inputs: Inputs) -> Tensor:
    mask = _engine_pair(inputs)[2]
    losses = inputs.rows("per_token_policy_loss")
    if losses.shape != mask.shape:
        raise DataError(f"inputs.per_token_policy_loss has shape {list(losses.shape)}; it needs that of the mask, {list(mask.shape)}")
    weighted = losses * _weights(inputs)
    return aggregate(weighted, mask, count_trained([mask]), loss_aggregation="token_mean")


def _dropped_fraction(inputs: Inputs) -> float:
    old, rollout, mask = _engine_pair(inputs)
    mode, _, high = _bounds(inputs)
    kept = torch.ones(len(mask), dtype=torch.bool)
    sums = correction_sums(old, rollout, mask, _weights(inputs), kept, importance_weights=mode, importance_high=high)
    return float(sums["importance_dropped_fraction"]) / max(1.0, float(mask.sum()))


TRUNCATED_IS = Family(
    required=("train_old_logprobs", "rollout_logprobs"),
    optional=("mask", "cap", "low", "high", "per_token_policy_loss"),
    outputs={
        "weights": lambda inputs: _weights(inputs).reshape(inputs.tensor("train_old_logprobs").shape),
        "weighted_token_mean": _weighted_token_mean,
        "dropped_fraction": _dropped_fraction,
    },
)
