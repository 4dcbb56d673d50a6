"""Families of estimators without groups, and of the whitening that they share."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs, gae_estimator, reinforce_pp_estimator
from shoal.algo.masking import Moments, masked_moments, whiten
from shoal.algo.rewards import outcome_rewards, penalised_rewards
from shoal.cases.comparing import Each
from shoal.cases.family import Compute, Family
from shoal.cases.inputs import Inputs
from shoal.config.algorithm import AlgorithmSection
from shoal.errors import DataError

_DEFAULTS = AlgorithmSection()
_WHITENING_EPS = 1e-8


def _bootstrap_values(inputs: Inputs, num_rows: int, *, bootstrap: bool) -> Tensor | None:
    """[B] value after the last token of truncated responses, 0 for the others; None where nothing is continued."""
    ended = inputs.items("ended") if inputs.has("ended") else ["terminated"] * num_rows
    if len(ended) != num_rows or not all(end in ("terminated", "truncated") for end in ended):
        raise DataError(f"inputs.ended is {ended!r}; it must be 'terminated' or 'truncated' for each of the {num_rows} rows")
    is_needed = bootstrap and "truncated" in ended
    given = inputs.vector("bootstrap_value", num_rows) if is_needed or inputs.has("bootstrap_value") else None
    if not is_needed or given is None:
        return None
    is_truncated = torch.tensor([end == "truncated" for end in ended])
    return torch.where(is_truncated, given, 0.0)


def _gae(inputs: Inputs, *, bootstrap: bool) -> dict[str, Tensor]:
    rewards, values, mask = inputs.rows("rewards"), inputs.rows("values"), inputs.mask()
    batch = AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        values=values,
        bootstrap_values=_bootstrap_values(inputs, len(rewards), bootstrap=bootstrap),
    )
    gamma, lam = inputs.number("gamma", _DEFAULTS.gamma), inputs.number("lam", _DEFAULTS.lam)
    advantages, returns = gae_estimator(batch, gamma=gamma, lam=lam, whiten_advantages=False)
    shape = inputs.tensor("rewards").shape
    return {"advantages": advantages.reshape(shape), "returns": returns.reshape(shape)}


def _gae_output(name: str) -> Compute:
    """With the setting that the inputs give, else the configuration's default."""

    def compute(inputs: Inputs) -> Tensor:
        return _gae(inputs, bootstrap=inputs.flag("bootstrap_on_truncation", default=_DEFAULTS.bootstrap_truncated))[name]

    return compute


GAE = Family(
    required=("rewards", "values", "mask"),
    optional=("gamma", "lam", "ended", "bootstrap_value", "bootstrap_on_truncation"),
    outputs={
        "advantages": _gae_output("advantages"),
        "returns": _gae_output("returns"),
        "bootstrap_on_truncation_true": lambda inputs: _gae(inputs, bootstrap=True),
        "bootstrap_on_truncation_false": lambda inputs: _gae(inputs, bootstrap=False),
    },
)


def _reinforce_pp_returns(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    mask = inputs.mask()
    scores = inputs.vector("score", len(mask))
    if inputs.has("logprobs") or inputs.has("ref_logprobs"):
        kl_coef = inputs.number("kl_coef", 0.0)
        rewards, _ = penalised_rewards(scores, inputs.rows("logprobs"), inputs.rows("ref_logprobs"), mask, kl_coef=kl_coef)
    else:
        rewards = outcome_rewards(scores, mask)
    batch = AdvantageInputs(rewards=rewards, response_mask=mask)
    advantages, returns = reinforce_pp_estimator(batch, gamma=inputs.number("gamma", _DEFAULTS.gamma))
    return advantages, returns, mask


def _return_moments(inputs: Inputs) -> Moments:
    _, returns, mask = _reinforce_pp_returns(inputs)
    return masked_moments(returns, mask)


REINFORCE_PP = Family(
    required=("mask", "score"),
    optional=("logprobs", "ref_logprobs", "kl_coef", "gamma"),
    outputs={
        "returns": lambda inputs: _reinforce_pp_returns(inputs)[1],
        "mean": lambda inputs: _return_moments(inputs).mean,
        "var": lambda inputs: _return_moments(inputs).variance(),
        "advantages": lambda inputs: _reinforce_pp_returns(inputs)[0],
    },
)


def _whitened(values: Inputs, eps: float, ddof: int, *, shift_mean: bool) -> Tensor:
    x, mask = values.rows("values"), values.mask()
    return whiten(x, mask, masked_moments(x, mask), shift_mean=shift_mean, ddof=ddof, eps=eps)


def _whitening(part: str | None, ddof: int, *, shift_mean: bool) -> Compute:
    def compute(inputs: Inputs) -> Tensor:
        values = inputs if part is None else inputs.part(part, inputs.get(part), required=("values", "mask"), optional=("eps",))
        eps = values.number("eps", inputs.number("eps", _WHITENING_EPS))
        return _whitened(values, eps, ddof, shift_mean=shift_mean)

    return compute


def _each(first: Compute, second: Compute) -> Compute:
    return lambda inputs: Each({"ddof0": first(inputs), "ddof1": second(inputs)})


def _whitening_outputs(inputs: Inputs) -> Mapping[str, Compute]:
    """ddof0, ddof1 and any_ddof, with and without _shiftTrue or _shiftFalse, of the inputs or of each sub-batch."""
    parts = [key for key, value in inputs.values.items() if _is_sub_batch(key, value)]
    computes: dict[str, Compute] = {}
    for part in [*([None] if inputs.has("values") else []), *parts]:
        prefix = "" if part is None else f"{part}_"
        for suffix, shift_mean in (("", True), ("_shiftTrue", True), ("_shiftFalse", False)):
            both = [_whitening(part, ddof, shift_mean=shift_mean) for ddof in (0, 1)]
            computes |= {f"{prefix}ddof{ddof}{suffix}": compute for ddof, compute in enumerate(both)}
            computes[f"{prefix}any_ddof{suffix}"] = _each(*both)
    return computes


def _is_sub_batch(key: str, value: object) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9]*", key) is not None and isinstance(value, dict)


WHITENING = Family(optional=("values", "mask", "eps"), outputs=_whitening_outputs, is_part=_is_sub_batch)
"""(x - mean) / sqrt(var + eps), plus the mean where shift is off; without _shift* the mean is shifted."""
