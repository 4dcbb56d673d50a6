"""Configured names -> functions. The names themselves are in `shoal.config.functions`; a user's own function is an `Entrypoint`.

A function's keyword-only parameters are filled from the configuration fields of the same name by `bind`, and from the entrypoint's
settings. A user's function is checked when it is loaded, and its first result when it is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.lookup import lookup
from shoal.algo.losses import TokenLoss
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Choice, Entrypoint, Registered
from shoal.errors import ConfigError

Result = TypeVar("Result")

ESTIMATOR_ARGUMENTS = ("inputs", "sum_over_ranks")
POLICY_LOSS_ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "response_mask")
VALUE_LOSS_ARGUMENTS = ("values", "old_values", "returns", "response_mask")


def load_function(setting: str, choice: Choice, registry: Mapping[str, Registered]) -> Callable[..., Any]:
    """Import the function of a name, or of a user's own module; its `settings` are fixed.

    Args:
        setting: field of the algorithm section, for messages.
    Raises: ConfigError: unknown name, or an entrypoint that cannot be imported.
    """
    path = choice.entrypoint if isinstance(choice, Entrypoint) else lookup(registry, setting, choice).path
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a user's module runs here, and may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"algorithm.{setting}: {path} cannot be imported ({reason}); install the module where the trainer runs"
        ) from error
    if not callable(function):
        raise ConfigError(f"algorithm.{setting}: {path} is a {type(function).__name__}; give the path of a function")
    return functools.partial(function, **choice.settings) if isinstance(choice, Entrypoint) else function


def bind(function: Callable[..., Result], algorithm: AlgorithmSection) -> Callable[..., Result]:
    """Fix a function's keyword-only parameters to the configuration fields of the same name.

    Raises: ConfigError: a parameter without default has no field.
    """
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    settings: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.name in fixed:
            continue
        if parameter.name in type(algorithm).model_fields:
            settings[parameter.name] = getattr(algorithm, parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{_name(function)} needs the setting {parameter.name!r}, which algorithm has not; give it a default or add the field"
            )
    return functools.partial(function, **settings)


def advantage_estimator(algorithm: AlgorithmSection) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `(inputs, sum_over_ranks) -> (advantages, returns)` as configured.

    Raises: ConfigError: unknown estimator, missing setting, or a function of the user's that does not fit.
    """
    return _configured("estimator", algorithm.estimator, ESTIMATORS, algorithm, ESTIMATOR_ARGUMENTS, _check_advantages)


def policy_loss(algorithm: AlgorithmSection) -> Callable[..., TokenLoss]:
    """Return `(logprobs, old_logprobs, advantages, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss, missing setting, or a function of the user's that does not fit.
    """
    return _configured("policy_loss", algorithm.policy_loss, POLICY_LOSSES, algorithm, POLICY_LOSS_ARGUMENTS, _check_token_loss)


def value_loss(algorithm: AlgorithmSection) -> Callable[..., TokenLoss]:
    """Return `(values, old_values, returns, response_mask) -> TokenLoss` as configured.

    Raises: ConfigError: unknown loss, missing setting, or a function of the user's that does not fit.
    """
    return _configured("value_loss", algorithm.value_loss, VALUE_LOSSES, algorithm, VALUE_LOSS_ARGUMENTS, _check_token_loss)


def _configured(
    setting: str,
    choice: Choice,
    registry: Mapping[str, Registered],
    algorithm: AlgorithmSection,
    arguments: tuple[str, ...],
    check: Callable[[object, tuple[Any, ...]], str | None],
) -> Callable[..., Any]:
    function = load_function(setting, choice, registry)
    if not isinstance(choice, Entrypoint):
        return bind(function, algorithm)
    where = f"algorithm.{setting}: {choice.entrypoint}"
    try:
        _check_settings(where, choice, inspect.signature(_unwrapped(function)), type(algorithm).model_fields, len(arguments))
        bound = bind(function, algorithm)
        inspect.signature(bound).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} cannot be called as ({', '.join(arguments)}): {error}") from error
    return _CheckedOnce(bound, where, check)


def _check_settings(where: str, choice: Entrypoint, signature: inspect.Signature, fields: Mapping[str, object], num_arguments: int) -> None:
    doubled = [name for name in choice.settings if name in fields]
    if doubled:
        raise ConfigError(f"{where}: settings.{doubled[0]} is also a field of algorithm; set algorithm.{doubled[0]} and remove it here")
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    names = list(signature.parameters)[num_arguments:]
    unknown = [name for name in choice.settings if name not in names and not takes_any]
    if unknown:
        raise ConfigError(f"{where} has no setting {unknown[0]!r}; it takes {', '.join(names) or 'none'}")


class _CheckedOnce(Generic[Result]):
    """A user's function whose first result is checked; the rest of a run pays nothing."""

    def __init__(self, function: Callable[..., Result], where: str, check: Callable[[object, tuple[Any, ...]], str | None]) -> None:
        self._function = function
        self._where = where
        self._check = check
        self._checked = False

    def __call__(self, *arguments: Any) -> Result:  # noqa: ANN401 - passed on as they are
        result = self._function(*arguments)
        if not self._checked:
            problem = self._check(result, arguments)
            if problem is not None:
                raise ConfigError(f"{self._where} returned {problem}")
            self._checked = True
        return result


def _check_advantages(result: object, arguments: tuple[Any, ...]) -> str | None:
    """What is wrong with an estimator's result, or None."""
    inputs = arguments[0]
    assert isinstance(inputs, AdvantageInputs)  # noqa: S101 - the trainer's call
    if not isinstance(result, tuple) or len(result) != 2:
        return f"{_kind(result)}; return the two tensors (advantages, returns)"
    problems = (_tensor_problem(name, value, inputs.response_mask) for name, value in zip(("advantages", "returns"), result, strict=True))
    return next((problem for problem in problems if problem), None)


def _check_token_loss(result: object, arguments: tuple[Any, ...]) -> str | None:
    """What is wrong with a loss's result, or None."""
    variable, mask = arguments[0], arguments[3]
    if not isinstance(result, TokenLoss):
        return f"{_kind(result)}; return a shoal.algo.losses.TokenLoss"
    problem = _tensor_problem("per_token", result.per_token, mask)
    if problem:
        return problem
    if torch.is_grad_enabled() and variable.requires_grad and not result.per_token.requires_grad:
        return "per_token without a gradient to its first argument; do not detach it, nothing would be trained"
    metrics = {**result.sums, **result.maxima}
    wrong = [name for name, value in metrics.items() if not isinstance(value, Tensor) or value.numel() != 1]
    return f"metric {wrong[0]!r} as {_kind(metrics[wrong[0]])}; sums and maxima are tensors of one number" if wrong else None


def _tensor_problem(name: str, value: object, mask: Tensor) -> str | None:
    if not isinstance(value, Tensor):
        return f"{name} as {_kind(value)}; return a tensor"
    if value.shape != mask.shape:
        return f"{name} of shape {tuple(value.shape)}; it must be that of response_mask, {tuple(mask.shape)}"
    return None if value.is_floating_point() else f"{name} of {value.dtype}; return floating point numbers"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def _name(function: Callable[..., Any]) -> str:
    inner = _unwrapped(function)
    return getattr(inner, "__name__", repr(inner))
