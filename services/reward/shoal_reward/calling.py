"""Calls plain scorers with what they take, and makes results of what they give or raise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.errors import DataError
from shoal.reward import Row, Scorer
from shoal.types import ScoreResult, ScoreSample
from shoal_reward.outcome import outcome, raised


def arguments_of(scorer: Scorer, sample: ScoreSample) -> tuple[str, str, Row]:
    """Prompt, response and row as the scorer takes them.

    Raises: DataError: it needs token ids and the sample has none.
    """
    if not scorer.needs_token_ids:
        return sample.prompt, sample.response, sample.row
    if len(sample.response_ids) != sample.num_response_tokens:
        raise DataError(
            f"scorer {scorer.name!r} needs token ids, and the sample came with {len(sample.response_ids)} of its "
            f"{sample.num_response_tokens} response_ids: send them to scorers whose description asks for them"
        )
    return sample.prompt, sample.response, {**sample.row, "prompt_ids": list(sample.prompt_ids), "response_ids": list(sample.response_ids)}


def score_one(scorer: Scorer, sample: ScoreSample) -> ScoreResult:
    """Score a sample with a plain scorer of single samples."""
    started = time.perf_counter()
    try:
        return outcome(sample, scorer.function(*arguments_of(scorer, sample)), ms_since(started))
    except BaseException as error:  # noqa: BLE001 - whatever a scorer raises, an exit included, is an error of this sample only
        return raised(sample, error, ms_since(started))


def score_together(scorer: Scorer, samples: Sequence[ScoreSample]) -> list[ScoreResult] | None:
    """Score samples by one call of a plain batch scorer; None if the call raised and there are several, to be tried one by one."""
    if len(samples) == 1:
        return [score_alone(scorer, samples[0])]
    call = BatchCall(scorer, samples)
    try:
        return call.results(scorer.function(*call.columns))
    except BaseException:  # noqa: BLE001 - whatever a scorer raises, an exit included, is told of the samples that raise again
        return None


def score_alone(scorer: Scorer, sample: ScoreSample) -> ScoreResult:
    """Score one sample with a plain batch scorer."""
    call = BatchCall(scorer, [sample])
    try:
        return call.results(scorer.function(*call.columns))[0]
    except BaseException as error:  # noqa: BLE001 - whatever a scorer raises, an exit included, is an error of this sample only
        return call.failed(error)[0]


class BatchCall:
    """One call of a batch scorer: its arguments, and results from what it returns. Samples without needed token ids stay out of it."""

    def __init__(self, scorer: Scorer, samples: Sequence[ScoreSample]) -> None:
        self._samples = samples
        self._refused: dict[int, ScoreResult] = {}
        self.columns: tuple[list[str], list[str], list[Row]] = ([], [], [])
        self._started = time.perf_counter()
        for index, sample in enumerate(samples):
            try:
                arguments = arguments_of(scorer, sample)
            except DataError as error:
                self._refused[index] = raised(sample, error, 0.0)
            else:
                self._append(*arguments)

    def _append(self, prompt: str, response: str, row: Row) -> None:
        prompts, responses, rows = self.columns
        prompts.append(prompt)
        responses.append(response)
        rows.append(row)

    def results(self, returned: Any) -> list[ScoreResult]:  # noqa: ANN401 - user code returns anything
        """One result per sample; another number of scores is an error of all of them."""
        latency_ms, num_called = ms_since(self._started), len(self.columns[0])
        scores = list(returned)
        if len(scores) != num_called:
            problem = ValueError(f"the batch scorer returned {len(scores)} scores for {num_called} samples: return one per sample")
            return self.failed(problem)
        given = iter(scores)
        return [
            self._refused[index] if index in self._refused else outcome(sample, next(given), latency_ms)
            for index, sample in enumerate(self._samples)
        ]

    def failed(self, error: BaseException) -> list[ScoreResult]:
        """An error of every sample."""
        latency_ms = ms_since(self._started)
        return [self._refused.get(index) or raised(sample, error, latency_ms) for index, sample in enumerate(self._samples)]


def ms_since(started: float) -> float:
    """Milliseconds since a reading of time.perf_counter()."""
    return (time.perf_counter() - started) * 1e3
