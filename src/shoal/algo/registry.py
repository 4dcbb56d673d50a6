"""Configured names -> functions. The names themselves are in `shoal.config.functions`; a user's own function is an `Entrypoint`.

A function's keyword-only parameters are filled from the configuration fields of the same name by `bind`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from shoal.algo import losses
from shoal.algo.lookup import lookup
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Choice, Entrypoint, Registered
from shoal.errors import ConfigError

Result = TypeVar("Result")


def load_function(setting: str, choice: Choice, registry: Mapping[str, Registered]) -> Callable[..., Any]:
    """Import the function of a name, or of a user's own module.

    Args:
        setting: field of the algorithm section, for messages.
    Raises: ConfigError: unknown name, or an entrypoint that cannot be imported.
    """
    path = choice.entrypoint if isinstance(choice, Entrypoint) else lookup(registry, setting, choice).path
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.{setting}: {path} cannot be imported ({error}); install the module where the trainer runs") from error
    if not callable(function):
        raise ConfigError(f"algorithm.{setting}: {path} is a {type(function).__name__}; give the path of a function")
    return functools.partial(function, **choice.settings) if isinstance(choice, Entrypoint) else function


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
    return bind(load_function("estimator", algorithm.estimator, ESTIMATORS), algorithm)


def policy_loss(algorithm: AlgorithmSection) -> Callable[..., losses.TokenLoss]:
    """Return `(logprobs, old_logprobs, advantages, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss or missing setting.
    """
    return bind(load_function("policy_loss", algorithm.policy_loss, POLICY_LOSSES), algorithm)


def value_loss(algorithm: AlgorithmSection) -> Callable[..., losses.TokenLoss]:
    """Return `(values, old_values, returns, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss or missing setting.
    """
    return bind(load_function("value_loss", algorithm.value_loss, VALUE_LOSSES), algorithm)
