"""What a grader does with a request: prepare the scorer once, score, answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from shoal.codec.reward import score_result_to_proto, score_sample_from_proto
from shoal.errors import CodecError
from shoal.reward import Scorer
from shoal.rpc.v1 import reward_pb2
from shoal.types import ScoreResult, ScoreSample
from shoal_reward.calling import score_one, score_together
from shoal_reward.grading.progress import Phase, ProgressPage
from shoal_reward.outcome import OUT_OF_MEMORY, failure

PREPARE_RETRY_S = 10.0
"""How long the error of a failed `prepare` stands before it is tried again."""


class Grader:
    """Scores requests in this process, one after the other."""

    def __init__(self, scorers: Iterable[Scorer], progress: ProgressPage) -> None:
        self._scorers = {(scorer.name, scorer.version): scorer for scorer in scorers}
        self._progress = progress
        self._prepared: set[tuple[str, str]] = set()
        self._unprepared: dict[tuple[str, str], tuple[str, float]] = {}
        self.is_out_of_memory = False
        """A sample met the memory limit: what it left may keep the next ones from memory."""

    def answer(self, sequence: int, payload: bytes) -> bytes:
        """Answer a ScoreRequest by a ScoreResponse."""
        request = reward_pb2.ScoreRequest.FromString(payload)
        scorer = self._scorers[(request.scorer, request.version)]
        try:
            problem = self._prepare(scorer, sequence)
            self._progress.enter(Phase.SCORING, sequence)
            results = _all_failed(request.samples, problem) if problem is not None else self._score(scorer, request.samples)
        finally:
            self._progress.leave()
        return reward_pb2.ScoreResponse(results=map(score_result_to_proto, results)).SerializeToString()

    def _prepare(self, scorer: Scorer, sequence: int) -> str | None:
        key = (scorer.name, scorer.version)
        if scorer.prepare is None or key in self._prepared:
            return None
        problem, until = self._unprepared.get(key, ("", 0.0))
        if time.monotonic() < until:
            return problem
        self._progress.enter(Phase.PREPARING, sequence)
        try:
            scorer.prepare()
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is an error of the samples, not of the grader
            problem = f"scorer {scorer.name!r} could not prepare: {type(error).__name__}: {error}"
            self._unprepared[key] = (problem, time.monotonic() + PREPARE_RETRY_S)
            return problem
        self._prepared.add(key)
        return None

    def _score(self, scorer: Scorer, messages: Sequence[reward_pb2.ScoreSample]) -> list[ScoreResult]:
        read = [_read(message) for message in messages]
        samples = [sample for sample in read if isinstance(sample, ScoreSample)]
        if not samples:
            scored: list[ScoreResult] | None = []
        elif scorer.is_batch:
            scored = score_together(scorer, samples)
        else:
            scored = [score_one(scorer, sample) for sample in samples]
        if scored is None:
            return []
        self.is_out_of_memory |= any(result.message == OUT_OF_MEMORY for result in scored)
        given = iter(scored)
        return [next(given) if isinstance(each, ScoreSample) else each for each in read]


def _read(message: reward_pb2.ScoreSample) -> ScoreSample | ScoreResult:
    try:
        return score_sample_from_proto(message)
    except CodecError as error:
        return failure(message.sample_id, str(error), 0.0)


def _all_failed(messages: Sequence[reward_pb2.ScoreSample], problem: str) -> list[ScoreResult]:
    return [failure(message.sample_id, problem, 0.0) for message in messages]
