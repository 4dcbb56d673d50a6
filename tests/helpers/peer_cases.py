"""Inputs, outputs and gradients that functions of other systems gave, read from tests/cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.algo.aggregation import aggregate, count_trained
from tests.helpers.math_cases import numbers, read_json

RTOL, ATOL = 1e-6, 1e-7
"""verl divides by (count + 1e-8)."""


def verl_cases(function: str, **params: object) -> list[dict[str, Any]]:
    """Cases of one function of verl's, with these parameters."""
    return _cases("verl-oracles.json", function, params)


def trl_cases(function: str, **params: object) -> list[dict[str, Any]]:
    """Cases of one function of TRL's, with these parameters."""
    return _cases("trl-oracles.json", function, params)


def functions_of(file: str) -> set[str]:
    """Names of all functions that were recorded, with their mode; cases are kept of the compared ones only."""
    return set(read_json(file)["functions"])


def name_of(case: dict[str, Any]) -> str:
    """Readable test id."""
    return "-".join([str(case["batch"]), *(f"{key}={value}" for key, value in case["params"].items())])


def tensor_of(stored: dict[str, Any]) -> Tensor:
    """A stored array in float64."""
    return numbers(stored["data"]).reshape(stored["shape"])


def inputs_of(case: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments of the function by name; both systems were given the same batches."""
    batch = read_json("verl-oracles.json")["inputs"][case["batch"]]
    return {argument: tensor_of(batch[stored]) for argument, stored in case["inputs"].items()}


def check_tokens(actual: Tensor, stored: dict[str, Any], mask: Tensor, *, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Compare at trained tokens: what masked slots hold is defined here (0), not there."""
    torch.testing.assert_close(actual[mask], tensor_of(stored)[mask], rtol=rtol, atol=atol)
    assert bool((actual[~mask] == 0).all())


def check_loss(loss: Tensor, expected: float, variable: Tensor, gradient: Tensor) -> None:
    """Compare a loss and its gradient."""
    assert float(loss.detach()) == pytest.approx(expected, rel=RTOL, abs=ATOL)
    torch.testing.assert_close(torch.autograd.grad(loss, variable)[0], gradient, rtol=RTOL, atol=ATOL)


def aggregated(per_token: Tensor, mask: Tensor, mode: str, norm_length: float | None = None) -> Tensor:
    """One number from the tokens of the whole batch; mode in either spelling."""
    counts = count_trained([mask])
    return aggregate(per_token, mask, counts, loss_aggregation=mode.replace("-", "_"), norm_length=norm_length)


def _cases(file: str, function: str, params: dict[str, object]) -> list[dict[str, Any]]:
    cases = [case for case in read_json(file)["cases"] if case["fn"] == function]
    chosen = [case for case in cases if all(case["params"].get(key) == value for key, value in params.items())]
    if not chosen:
        raise LookupError(f"no case of {function} with {params} in {file}")
    return chosen
