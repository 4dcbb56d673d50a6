"""Families of estimators that compare the samples of one prompt."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.group_advantages import frac_zero_std, group_statistics, grpo_estimator, rloo_estimator
from shoal.cases.comparing import Claim, Each
from shoal.cases.family import Compute, Family
from shoal.cases.inputs import Inputs
from shoal.config.algorithm import AlgorithmSection
from shoal.errors import DataError

_DEFAULTS = AlgorithmSection()
_BOUND = re.compile(r"abs\(advantages?\) *(?P<relation><=?) *(?P<bound>[0-9.eE+-]+)( for every sample)?")


def group_index_of(inputs: Inputs) -> tuple[Tensor, int]:
    """Number of each sample's group, by uid and never by position, and how many groups there are."""
    uids = inputs.items("uid")
    if not all(isinstance(uid, str | int) and not isinstance(uid, bool) for uid in uids):
        raise DataError(f"inputs.uid is {uids!r}; it must be a list of texts or whole numbers")
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor([numbers[uid] for uid in uids], dtype=torch.int64), len(numbers)


def _batch(inputs: Inputs) -> AdvantageInputs:
    """Samples of one token each, with the outcome reward on it."""
    index, num_groups = group_index_of(inputs)
    rewards = inputs.vector("rewards", len(index))[:, None]
    return AdvantageInputs(
        rewards=rewards, response_mask=torch.ones_like(rewards, dtype=torch.bool), group_index=index, num_groups=num_groups
    )


def _grpo(inputs: Inputs, group_std: str, group_baseline: str = "mean") -> Tensor:
    eps = inputs.number("eps", _DEFAULTS.group_eps)
    advantages, _ = grpo_estimator(_batch(inputs), group_std=group_std, group_eps=eps, group_baseline=group_baseline)
    return advantages[:, 0]


def _standardised(group_std: str) -> Compute:
    return lambda inputs: _grpo(inputs, group_std)


def _any_ddof(inputs: Inputs) -> Each:
    return Each({"ddof0": _grpo(inputs, "population"), "ddof1": _grpo(inputs, "sample")})


def _zero_std_fraction(inputs: Inputs) -> Tensor:
    index, num_groups = group_index_of(inputs)
    return frac_zero_std(group_statistics(inputs.vector("rewards", len(index)), index, num_groups), index, num_groups)


def _bound(inputs: Inputs) -> Claim:
    """The largest leave-one-out advantage that is divided by a standard deviation, either divisor."""
    largest = max(float(_grpo(inputs, group_std, "leave_one_out").abs().max()) for group_std in ("sample", "population"))

    def check(sentence: str) -> str | None:
        match = _BOUND.fullmatch(sentence.strip())
        if match is None:
            raise DataError(f"{sentence!r} is no known sentence; known is 'abs(advantage) <= NUMBER for every sample'")
        bound = float(match["bound"])
        # Written so that NaN breaks the bound.
        holds = largest <= bound if match["relation"] == "<=" else largest < bound
        return None if holds else f"a largest size of {largest:g}"

    return Claim(check)


GRPO = Family(
    required=("rewards", "uid"),
    optional=("eps",),
    outputs={
        "ddof0": _standardised("population"),
        "ddof1": _standardised("sample"),
        "no_std": _standardised("none"),
        "any_ddof": _any_ddof,
        "frac_zero_std_groups": _zero_std_fraction,
        "unnormalised": lambda inputs: _grpo(inputs, "none", "leave_one_out"),
        "bound_when_normalised": _bound,
    },
)
"""ddof*: (r - mean) / (std + eps). unnormalised: r - mean of the others. bound_when_normalised: of the latter, divided by a std."""

RLOO = Family(required=("rewards", "uid"), outputs={"advantages": lambda inputs: rloo_estimator(_batch(inputs))[0][:, 0]})
