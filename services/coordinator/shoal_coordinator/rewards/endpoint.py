"""A reward server, as scoring sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.types import ScorerDescription, ScoreResult, ScoreSample


class RewardEndpoint(Protocol):
    """What scoring needs of a reward server."""

    @property
    def scorers(self) -> Sequence[ScorerDescription]:
        """What it said it offers."""
        ...

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """Score samples; returns the scorer's version and one result per sample, in order."""
        ...
