"""What a shadow has to show before it may become active."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_coordinator.rewards.comparison import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Bounds on a comparison; None does not ask.

    min_samples: samples that both revisions have scored. min_rank_correlation: Spearman's, from -1 to 1. max_p99_ms: the shadow's
    latency, in milliseconds. max_error_share: of the shadow's samples.
    """

    min_samples: int | None = None
    min_rank_correlation: float | None = None
    max_p99_ms: float | None = None
    max_error_share: float | None = None


def gate_problems(gates: Gates, comparison: Comparison) -> list[str]:
    """Say which gates a comparison does not pass, each with the number and the bound; empty is a pass."""
    problems = (
        _num_samples(gates.min_samples, comparison),
        _rank_correlation(gates.min_rank_correlation, comparison),
        _p99(gates.max_p99_ms, comparison),
        _error_share(gates.max_error_share, comparison),
    )
    return [problem for problem in problems if problem is not None]


def _num_samples(bound: int | None, comparison: Comparison) -> str | None:
    if bound is None or comparison.num_samples >= bound:
        return None
    return f"min_samples: {comparison.num_samples} samples were scored by both revisions, fewer than {bound}"


def _rank_correlation(bound: float | None, comparison: Comparison) -> str | None:
    if bound is None:
        return None
    if comparison.spearman is None:
        return f"min_rank_correlation: there is no rank correlation to compare with {bound:g}: {_why_undefined(comparison)}"
    if comparison.spearman >= bound:
        return None
    return f"min_rank_correlation: the rank correlation is {comparison.spearman:.4g}, below {bound:g}"


def _why_undefined(comparison: Comparison) -> str:
    if comparison.num_samples < 2:
        return f"{comparison.num_samples} samples were scored by both revisions, and it takes two"
    names = {"active": (comparison.active, comparison.std.active), "shadow": (comparison.number, comparison.std.shadow)}
    constant = [f"the {side} revision {number}" for side, (number, std) in names.items() if not std]
    who = " and ".join(constant) or "one of the revisions"
    return f"{who} gave every sample the same reward"


def _p99(bound: float | None, comparison: Comparison) -> str | None:
    if bound is None:
        return None
    p99 = comparison.latency_ms.shadow.p99
    if p99 is None:
        return f"max_p99_ms: the servers of revision {comparison.number} have reported no latency to compare with {bound:g} ms"
    return None if p99 <= bound else f"max_p99_ms: the 99th percentile of the latency is {p99:.4g} ms, above {bound:g} ms"


def _error_share(bound: float | None, comparison: Comparison) -> str | None:
    if bound is None:
        return None
    share = comparison.error_share.shadow
    if share is None:
        return f"max_error_share: revision {comparison.number} was asked for no sample, so there is no share to compare with {bound:g}"
    if share <= bound:
        return None
    reason = f"; first error: {comparison.first_error}" if comparison.first_error else ""
    return f"max_error_share: {share:.4g} of the samples were errors, above {bound:g}{reason}"
