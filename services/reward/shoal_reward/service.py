"""The reward service without its wire: finds the scorer, runs it, counts what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.reward import Scorer, ScorerRegistry
from shoal.telemetry.logs import get_logger
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from shoal_reward import metrics
from shoal_reward.scoring import ScoringPool

log = get_logger(__name__)

_MARGIN_SHARE = 0.1
_MAX_MARGIN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardService:
    """Scores batches with the scorers of one registry."""

    service_id: str
    registry: ScorerRegistry
    pool: ScoringPool

    def describe(self) -> list[ScorerDescription]:
        """All scorers, by name, oldest version first."""
        return [
            ScorerDescription(name=scorer.name, version=scorer.version, description=scorer.description) for scorer in self.registry.all()
        ]

    def find(self, name: str, version: str) -> Scorer:
        """Find a scorer; an empty version takes the newest. Raises NotFoundError, which lists what there is."""
        return self.registry.get(name, version)

    async def score(self, scorer: Scorer, samples: Sequence[ScoreSample], time_remaining_s: float) -> list[ScoreResult]:
        """Score a batch inside the caller's deadline; one result per sample, in order.

        Args:
            scorer: what to run.
            samples: any number, none included.
            time_remaining_s: seconds until the caller gives up; a small part is kept to send the answer.
        """
        margin_s = min(_MAX_MARGIN_S, _MARGIN_SHARE * time_remaining_s)
        results = await self.pool.score(scorer, samples, time_remaining_s - margin_s)
        tally = metrics.count(scorer, results)
        metrics.running_threads.set(self.pool.num_running)
        if num_errors := tally[ScoreStatus.ERROR]:
            # The messages go to the caller only: they may quote the response.
            log.warning("samples_failed", scorer=scorer.name, version=scorer.version, num_errors=num_errors, num_samples=len(results))
        return results
