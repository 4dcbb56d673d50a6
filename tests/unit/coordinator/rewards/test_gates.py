"""Gates: what passes, and why not."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from shoal_coordinator.rewards.agreement import Percentiles
from shoal_coordinator.rewards.comparison import Comparison, Sides
from shoal_coordinator.rewards.gates import Gates, gate_problems

GATES = Gates(min_samples=100, min_rank_correlation=0.5, max_p99_ms=50.0, max_error_share=0.1)


def make_comparison(
    num_samples: int = 100,
    spearman: float | None = 0.5,
    p99: float | None = 50.0,
    error_share: float | None = 0.1,
    std: tuple[float, float] = (1.0, 1.0),
    first_error: str | None = None,
) -> Comparison:
    return Comparison(
        number=3,
        active=2,
        num_samples=num_samples,
        spearman=spearman,
        std=Sides(active=std[0], shadow=std[1]),
        latency_ms=Sides(active=Percentiles(), shadow=Percentiles(p50=1.0, p95=2.0, p99=p99)),
        error_share=Sides(active=0.0, shadow=error_share),
        first_error=first_error,
    )


def test_comparison_on_every_bound_passes() -> None:
    assert gate_problems(GATES, make_comparison()) == []


@pytest.mark.parametrize(
    ("comparison", "words"),
    [
        (make_comparison(num_samples=99), ["min_samples", "99", "100"]),
        (make_comparison(spearman=0.4999), ["min_rank_correlation", "0.4999", "0.5"]),
        (make_comparison(p99=50.1), ["max_p99_ms", "50.1 ms", "50 ms"]),
        (make_comparison(error_share=0.11, first_error="grade@2 on r: killed"), ["max_error_share", "0.11", "0.1", "grade@2 on r: killed"]),
        (make_comparison(spearman=None, std=(1.0, 0.0)), ["min_rank_correlation", "shadow revision 3", "same reward"]),
        (make_comparison(spearman=None, std=(0.0, 1.0)), ["min_rank_correlation", "active revision 2", "same reward"]),
        (make_comparison(p99=None), ["max_p99_ms", "no latency", "revision 3"]),
        (make_comparison(error_share=None), ["max_error_share", "no sample", "revision 3"]),
    ],
)
def test_gate_that_fails_says_number_and_bound(comparison: Comparison, words: list[str]) -> None:
    (problem,) = gate_problems(GATES, comparison)
    assert [word for word in words if word not in problem] == []


def test_every_gate_that_fails_is_named() -> None:
    problems = gate_problems(GATES, make_comparison(num_samples=1, spearman=None, p99=99.0, error_share=1.0))
    assert [problem.split(":")[0] for problem in problems] == list(asdict(GATES))
    assert "it takes two" in problems[1]


def test_nothing_passes_gates_before_the_first_sample_but_those_that_ask_nothing() -> None:
    empty = Comparison(number=3, active=2)
    assert len(gate_problems(GATES, empty)) == 4
    assert gate_problems(Gates(), empty) == []


def test_negative_bound_of_the_correlation_is_a_bound() -> None:
    assert gate_problems(Gates(min_rank_correlation=-0.2), make_comparison(spearman=-0.1)) == []
    assert len(gate_problems(Gates(min_rank_correlation=-0.2), make_comparison(spearman=-0.3))) == 1


def test_zero_errors_allowed_means_zero() -> None:
    assert gate_problems(Gates(max_error_share=0.0), make_comparison(error_share=0.0)) == []
    assert len(gate_problems(Gates(max_error_share=0.0), make_comparison(error_share=0.001))) == 1
