"""Names in the configuration -> functions. A new estimator or loss is one pure function and one line here.

`KL_ESTIMATORS` and `LOSS_AGGREGATIONS` lie beside their functions. A function's keyword-only parameters are filled from the configuration
fields of the same name by `bind`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from shoal.algo import advantages, losses
from shoal.algo.lookup import lookup
from shoal.config.models import AlgorithmSection
from shoal.errors import ConfigError

Result = TypeVar("Result")

ADVANTAGE_ESTIMATORS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gae": advantages.gae_estimator,
    "grpo": advantages.grpo_estimator,
    "rloo": advantages.rloo_estimator,
    "reinforce_pp": advantages.reinforce_pp_estimator,
}
"""(AdvantageInputs, SumOverRanks, *, settings) -> advantages, returns."""

POLICY_LOSSES: Mapping[str, Callable[..., losses.TokenLoss]] = {
    "ppo": losses.ppo_loss,
}
"""(logprobs, old_logprobs, advantages, response_mask, *, settings) -> TokenLoss."""

VALUE_LOSSES: Mapping[str, Callable[..., losses.TokenLoss]] = {
    "clipped": losses.value_loss,
}
"""(values, old_values, returns, response_mask, *, settings) -> TokenLoss."""

GROUP_ESTIMATORS = frozenset({"grpo", "rloo"})
"""Estimators that compare the samples of one prompt; a group of one is refused."""


def bind(function: Callable[..., Result], algorithm: AlgorithmSection) -> Callable[..., Result]:
    """Fix a function's keyword-only parameters to the configuration fields of the same name.

    Raises: ConfigError: a parameter without default has no field.
    """
    settings: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if hasattr(algorithm, parameter.name):
            settings[parameter.name] = getattr(algorithm, parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            name = getattr(function, "__name__", repr(function))
            raise ConfigError(f"{name} needs the setting {parameter.name!r}, which algorithm has not; give it a default or add the field")
    return functools.partial(function, **settings)


def advantage_estimator(algorithm: AlgorithmSection) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `(inputs, sum_over_ranks) -> (advantages, returns)` as configured.

    Raises: ConfigError: unknown estimator or missing setting.
    """
    return bind(lookup(ADVANTAGE_ESTIMATORS, "estimator", algorithm.estimator), algorithm)


def policy_loss(algorithm: AlgorithmSection, name: str = "ppo") -> Callable[..., losses.TokenLoss]:
    """Return `(logprobs, old_logprobs, advantages, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss or missing setting.
    """
    return bind(lookup(POLICY_LOSSES, "policy_loss", name), algorithm)


def value_loss(algorithm: AlgorithmSection, name: str = "clipped") -> Callable[..., losses.TokenLoss]:
    """Return `(values, old_values, returns, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss or missing setting.
    """
    return bind(lookup(VALUE_LOSSES, "value_loss", name), algorithm)
