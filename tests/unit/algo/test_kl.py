"""KL estimators, the reward penalty, and the adaptive coefficient."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shoal.algo.kl import KL_ESTIMATORS, max_log_gap, token_kl
from shoal.algo.steering import adapted_kl_coef
from shoal.config.algorithm import KlEstimator
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, math_case, numbers


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_values_and_gradients_equal_given_numbers(name: str) -> None:
    case = math_case("M-KL-01")
    logprobs = numbers(case["inputs"]["logprobs"]).requires_grad_()
    kl = token_kl(logprobs, numbers(case["inputs"]["ref_logprobs"]), torch.ones(4, dtype=torch.bool), kl_estimator=name)
    torch.autograd.backward(kl.sum())
    assert logprobs.grad is not None
    assert_close(kl.detach(), case["expected"][name])
    assert_close(logprobs.grad, case["expected"][f"grad_{name}"])


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_direction_is_policy_to_reference(name: str) -> None:
    case = math_case("M-KL-03")
    policy, ref = numbers(case["inputs"]["policy"]), numbers(case["inputs"]["ref"])
    kl = token_kl(policy.log(), ref.log(), torch.ones(3, dtype=torch.bool), kl_estimator=name)
    assert_close((policy * kl).sum(), case["expected"][f"E_{name}"])


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    case = math_case("M-KL-01")
    logprobs = numbers(case["inputs"]["logprobs"]).requires_grad_()
    kl = token_kl(logprobs, numbers(case["inputs"]["ref_logprobs"]), torch.ones(4, dtype=torch.bool), kl_estimator="k3_straight_through")
    torch.autograd.backward(kl.sum())
    assert logprobs.grad is not None
    assert_close(kl.detach(), case["expected"]["k3"])
    assert_close(logprobs.grad, case["expected"]["grad_k2"])


@pytest.mark.parametrize(("name", "reverse"), [("k2", False), ("k3_straight_through", False), ("k3", True)])
def test_gradient_over_the_policys_samples_is_that_of_a_kl(name: str, reverse: bool) -> None:
    """k3 alone has the gradient of the other direction; that is why the straight-through variant exists."""
    case = math_case("M-KL-03")
    ref = numbers(case["inputs"]["ref"])
    logits = numbers(case["inputs"]["policy"]).log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    policy = logprobs.detach().exp()
    kl = token_kl(logprobs, ref.log(), torch.ones(3, dtype=torch.bool), kl_estimator=name)
    # The sampling distribution is fixed: what the loss differentiates is the estimate at each sample.
    (estimated,) = torch.autograd.grad((policy * kl).sum(), logits, retain_graph=True)
    exact = (ref * (ref.log() - logprobs)).sum() if reverse else (logprobs.exp() * (logprobs - ref.log())).sum()
    assert_close(estimated, torch.autograd.grad(exact, logits)[0].tolist())


def test_estimators_are_those_of_the_configuration() -> None:
    assert set(KL_ESTIMATORS) == set(get_args(KlEstimator))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("gap", [-200.0, -90.0, 90.0, 200.0])
def test_kl_is_finite_in_float32_at_any_gap(name: str, gap: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([-1.0 + gap]), torch.ones(1, dtype=torch.bool), kl_estimator=name)
    torch.autograd.backward(kl.sum())
    assert logprobs.grad is not None
    assert bool(kl.isfinite().all())
    assert bool(logprobs.grad.isfinite().all())
    # Squares enter the gradient norm.
    assert bool(logprobs.grad.square().isfinite().all())
    # k2 and k3 pull the policy towards the reference however far away it is.
    assert name == "k1" or float(logprobs.grad) * gap < 0


def test_k3_is_exact_up_to_the_documented_gap_and_grows_beyond() -> None:
    limit = max_log_gap(torch.float64)
    ref = torch.tensor([90.0, limit, limit + 1.0], dtype=torch.float64)
    kl = KL_ESTIMATORS["k3"](torch.zeros(3, dtype=torch.float64), ref)
    assert_close(kl[:2], (ref[:2].exp() - ref[:2] - 1.0).tolist())
    assert float(kl[2]) > float(kl[1])


def test_k3_keeps_the_digits_of_a_small_gap_in_float32() -> None:
    logprobs = torch.tensor([-1e-3], dtype=torch.float32)
    kl = KL_ESTIMATORS["k3"](logprobs, torch.zeros(1))
    assert float(kl) == pytest.approx(5.0016671e-07, rel=1e-3)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_kl_ignores_masked_slots(name: str, garbage: float) -> None:
    logprobs = torch.tensor([-1.0, garbage], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([-2.0, -garbage]), torch.tensor([True, False]), kl_estimator=name)
    torch.autograd.backward(kl.sum())
    assert logprobs.grad is not None
    assert float(kl[1].detach()) == 0.0
    assert float(logprobs.grad[1]) == 0.0
    assert bool(logprobs.grad.isfinite().all())


def test_kl_refuses_an_unknown_estimator() -> None:
    with pytest.raises(ConfigError, match="kl_estimator is 'k4'; use one of k1, k2, k3, k3_straight_through"):
        token_kl(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), kl_estimator="k4")


def test_adapted_kl_coef_equals_given_numbers() -> None:
    case = math_case("M-KL-05")
    inputs = case["inputs"]
    kl_coef = inputs["kl_coef"]
    for step, expected in zip(inputs["steps"], case["expected"]["kl_coef_after"], strict=True):
        kl_coef = adapted_kl_coef(
            kl_coef, current_kl=step["current"], target_kl=inputs["target"], num_samples=step["n"], horizon=inputs["horizon"]
        )
        assert kl_coef == pytest.approx(expected, rel=1e-9)
