"""The reward service without its wire: finds the scorer, has it run where it belongs, counts what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.codec.reward import score_result_to_proto, score_sample_from_proto
from shoal.errors import CodecError, StateError
from shoal.reward import Isolation, Scorer, ScorerRegistry
from shoal.rpc.v1 import reward_pb2
from shoal.telemetry.logs import get_logger
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from shoal_reward import metrics
from shoal_reward.grading.pool import GraderPool
from shoal_reward.loading import describe
from shoal_reward.outcome import failure
from shoal_reward.room import Room
from shoal_reward.scoring import ScoringPool

log = get_logger(__name__)

_MARGIN_SHARE = 0.1
_MAX_MARGIN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardService:
    """Scores batches with the scorers of one registry: in `graders` those that can be killed, the others in `pool`, within `room`."""

    service_id: str
    registry: ScorerRegistry
    pool: ScoringPool
    graders: GraderPool | None = None
    room: Room = field(default_factory=Room)

    def describe(self) -> list[ScorerDescription]:
        """All scorers, by name, oldest version first."""
        return [describe(scorer) for scorer in self.registry.all()]

    def find(self, name: str, version: str) -> Scorer:
        """Find a scorer; an empty version takes the newest. Raises NotFoundError, which lists what there is."""
        return self.registry.get(name, version)

    async def score(
        self, scorer: Scorer, samples: Sequence[reward_pb2.ScoreSample], time_remaining_s: float
    ) -> list[reward_pb2.ScoreResult]:
        """Score a batch inside the caller's deadline; one result per sample, in order.

        Args:
            scorer: what to run.
            samples: as they came, since only who scores a sample needs to read it; any number, none included.
            time_remaining_s: seconds until the caller gives up; a small part is kept to send the answer.
        Raises:
            CapacityError: too many samples wait.
            StateError: the scorer runs in a process, and this service has no graders.
        """
        budget_s = time_remaining_s - min(_MAX_MARGIN_S, _MARGIN_SHARE * time_remaining_s)
        if scorer.isolation is Isolation.PROCESS:
            results = await self._graders_of(scorer).score(scorer, samples, budget_s)
        else:
            with self.room.taken(len(samples), sum(sample.ByteSize() for sample in samples)):
                results = await self._score_here(scorer, samples, budget_s)
        tally = metrics.count(scorer, results)
        if num_errors := tally.get(ScoreStatus.ERROR, 0):
            # The messages go to the caller only: they may quote the response.
            log.warning("samples_failed", scorer=scorer.name, version=scorer.version, num_errors=num_errors, num_samples=len(results))
        return results

    def _graders_of(self, scorer: Scorer) -> GraderPool:
        if self.graders is None:
            raise StateError(f"scorer {scorer.name!r} runs in a process and this service has no graders: start it with a GraderPool")
        return self.graders

    async def _score_here(
        self, scorer: Scorer, messages: Sequence[reward_pb2.ScoreSample], budget_s: float
    ) -> list[reward_pb2.ScoreResult]:
        samples, unreadable = _decode(messages)
        scored = iter(await self.pool.score(scorer, samples, budget_s))
        metrics.running_threads.set(self.pool.num_running)
        results = [unreadable[index] if index in unreadable else next(scored) for index in range(len(messages))]
        return [score_result_to_proto(result) for result in results]


def _decode(messages: Iterable[reward_pb2.ScoreSample]) -> tuple[list[ScoreSample], dict[int, ScoreResult]]:
    samples: list[ScoreSample] = []
    unreadable: dict[int, ScoreResult] = {}
    for index, message in enumerate(messages):
        try:
            samples.append(score_sample_from_proto(message))
        except CodecError as error:
            unreadable[index] = failure(message.sample_id, str(error), 0.0)
    return samples, unreadable
