"""What the optimizer moves, at which rate, and when it does not move anything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shoal_trainer.distributed import RankContext
from shoal_trainer.optimizer import Optimizer, StepOutcome
from torch import nn

from shoal.config.gang import GangSection
from tests.helpers.math_cases import math_case


def optimizer_of(parameters: list[nn.Parameter], context: RankContext, *, planned: int = 20, **gang: Any) -> Optimizer:  # noqa: ANN401
    return Optimizer(parameters, GangSection(**gang), context, planned_updates=planned)


def step_with(optimizer: Optimizer, parameter: nn.Parameter, gradient: float) -> StepOutcome:
    parameter.grad = torch.full_like(parameter, gradient)
    return optimizer.step()


def test_step_without_any_gradient_is_skipped_and_counted(context: RankContext) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optimizer_of([parameter], context, lr=0.1, weight_decay=0.1)
    # From here on there are moments, which alone would move the parameter.
    assert step_with(optimizer, parameter, 1.0).applied
    before = parameter.detach().clone()
    outcome = step_with(optimizer, parameter, 0.0)
    assert not outcome.applied
    assert outcome.grad_norm == 0.0
    assert torch.equal(parameter, before)
    assert (optimizer.num_updates, optimizer.num_skipped) == (1, 1)
    assert parameter.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_with_a_bad_gradient_is_skipped_and_leaves_moments_and_rate(context: RankContext, bad: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optimizer_of([parameter], context, lr=0.1, lr_schedule="linear")
    step_with(optimizer, parameter, 1.0)
    before, rate = parameter.detach().clone(), optimizer.lr
    moment = optimizer._adamw.state[parameter]["exp_avg"].clone()
    assert not step_with(optimizer, parameter, bad).applied
    assert torch.equal(parameter, before)
    assert torch.equal(optimizer._adamw.state[parameter]["exp_avg"], moment)
    assert (optimizer.lr, optimizer.num_skipped) == (rate, 1)


def test_frozen_parameters_are_left_out(context: RankContext) -> None:
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = optimizer_of([frozen, trained], context, lr=0.1, weight_decay=0.5)
    assert step_with(optimizer, trained, 1.0).applied
    assert torch.equal(frozen, torch.ones(2))
    assert [len(group["params"]) for group in optimizer._adamw.param_groups] == [1]


def test_rates_are_those_of_the_case_and_go_on_after_a_resume(context: RankContext) -> None:
    case = math_case("M-LRS-01")
    inputs, expected = case["inputs"], case["expected"]["lr_used_for_update_index"]
    settings = {"lr": inputs["base_lr"], "warmup_steps": inputs["warmup"], "lr_schedule": "linear"}
    parameter = nn.Parameter(torch.ones(1))
    optimizer = optimizer_of([parameter], context, planned=inputs["total"], **settings)
    rates = {str(index): step_with(optimizer, parameter, 1.0).lr for index in range(6)}
    assert rates == pytest.approx(expected, rel=1e-12)
    resumed = optimizer_of([parameter], context, planned=inputs["total"], **settings)
    resumed.num_updates = inputs["checkpoint_after_updates"]
    assert resumed.lr == pytest.approx(case["expected"]["lr_of_first_update_after_resume"], rel=1e-12)


def test_a_skipped_step_does_not_use_up_a_rate(context: RankContext) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = optimizer_of([parameter], context, planned=4, lr=1.0, lr_schedule="cosine", min_lr_share=0.2)
    rates = [step_with(optimizer, parameter, gradient).lr for gradient in (1.0, 0.0, math.nan, 1.0)]
    assert rates[0] == 1.0
    assert rates[1] == rates[2] == rates[3] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
