"""The KL coefficients from step to step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from shoal_coordinator.kl_controller import KlCoefficients, KlController

from shoal.config.algorithm import AlgorithmSection
from tests.helpers.math_cases import math_case


def make_section(**fields: Any) -> AlgorithmSection:  # noqa: ANN401
    """Adaptive with a target of 6 nats per response and both terms on unless said otherwise."""
    return AlgorithmSection.model_validate({"kl_controller": "adaptive", "kl_target": 6.0, "kl_in": "both"} | fields)


def test_controller_moves_the_coefficient_as_listed() -> None:
    """M-KL-05, with the state carried from step to step and through a restart."""
    case = math_case("M-KL-05")
    inputs = case["inputs"]
    section = make_section(kl_in="reward", kl_coef=inputs["kl_coef"], kl_target=inputs["target"], kl_horizon=inputs["horizon"])
    controller = KlController(section)
    seen = []
    for step in inputs["steps"]:
        controller.coefficients = controller.after(step["current"], step["n"])
        seen.append(controller.coefficients.kl_coef)
        controller = KlController(section, controller.coefficients)
    assert seen == pytest.approx(case["expected"]["kl_coef_after"], rel=1e-12)


def test_controller_moves_both_coefficients_by_the_same_factor() -> None:
    controller = KlController(make_section(kl_coef=0.1, kl_loss_coef=0.01))
    after = controller.after(100.0, 1000)
    assert (after.kl_coef, after.kl_loss_coef) == pytest.approx((0.1 * 1.02, 0.01 * 1.02))
    assert controller.coefficients == KlCoefficients(kl_coef=0.1, kl_loss_coef=0.01), "until the step has committed"


@pytest.mark.parametrize(
    ("kl_in", "expected"), [("none", (0.0, 0.0)), ("reward", (0.1, 0.0)), ("loss", (0.0, 0.01)), ("both", (0.1, 0.01))]
)
def test_coefficient_of_a_term_that_is_off_is_zero_and_stays_so(kl_in: str, expected: tuple[float, float]) -> None:
    controller = KlController(make_section(kl_in=kl_in, kl_coef=0.1, kl_loss_coef=0.01))
    assert (controller.coefficients.kl_coef, controller.coefficients.kl_loss_coef) == expected
    after = controller.after(60.0, 5000)
    assert (after.kl_coef, after.kl_loss_coef) == pytest.approx(tuple(1.1 * value for value in expected))


def test_fixed_coefficients_stay_and_are_those_of_the_settings_after_a_restart() -> None:
    controller = KlController(make_section(kl_controller="fixed", kl_coef=0.1), KlCoefficients(kl_coef=9.0, kl_loss_coef=9.0))
    assert controller.coefficients.kl_coef == 0.1
    assert controller.after(100.0, 1000) == controller.coefficients


@pytest.mark.parametrize("kl_per_response", [None, math.nan, math.inf])
def test_step_without_a_finite_kl_moves_nothing(kl_per_response: float | None, caplog: pytest.LogCaptureFixture) -> None:
    controller = KlController(make_section(kl_coef=0.1))
    assert controller.after(kl_per_response, 1000) == controller.coefficients
    assert "kl_controller_skips_step" in caplog.text
