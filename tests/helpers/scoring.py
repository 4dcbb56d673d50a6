"""Samples and scorers for tests of rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.reward import Scorer, ScorerRegistry, reward
from shoal.types import FinishReason, ScoreSample


def make_sample(index: int = 0, *, response: str = "46", num_response_tokens: int = 3, **row: object) -> ScoreSample:
    """A sample `uid/index/0`; the row defaults to {"answer": "46"}."""
    return ScoreSample(
        sample_id=f"uid/{index}/0",
        prompt="12+34=",
        response=response,
        row=row if row else {"answer": "46"},
        finish_reason=FinishReason.STOP,
        num_response_tokens=num_response_tokens,
    )


def make_samples(responses: Sequence[str]) -> list[ScoreSample]:
    """One sample per response."""
    return [make_sample(index, response=response) for index, response in enumerate(responses)]


def make_scorer(function: Callable[..., object], *, batch: bool = False) -> Scorer:
    """Register a function in a registry of its own and return its scorer."""
    registry = ScorerRegistry()
    reward(name="under_test", version="1", batch=batch, registry=registry)(function)
    return registry.get("under_test")
