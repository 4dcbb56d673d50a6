"""Greedy accuracy over held-out rows, through the same rollout servers and scorer as training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shoal.config.models import RolloutSection
from shoal.types import SamplingParams, ScoreResult, ScoreStatus
from shoal_coordinator.dispatcher import Dispatcher, GenerationRequest
from shoal_coordinator.prompts import PromptRow, as_task
from shoal_coordinator.scoring import GroupScorer, ScoredGroup

CORRECT_COMPONENT = "correct"
"""A scorer that gives this component decides with it; otherwise a total of 1 or more is correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of one evaluation.

    accuracy: correct answers as a part of all num rows; empty, missing and unscored answers count as wrong.
    mean_reward: over the scored answers, 0 without any. policy_versions: all that generated an answer.
    """

    accuracy: float
    mean_reward: float
    policy_versions: tuple[int, ...]
    num: int
    num_unscored: int


async def evaluate(
    rows: Sequence[PromptRow],
    dispatcher: Dispatcher,
    scorer: GroupScorer,
    config: RolloutSection,
    *,
    stop_token_ids: tuple[int, ...],
    min_policy_version: int = 0,
) -> Evaluation:
    """Generate one greedy answer per row and score it.

    Args:
        rows: held-out rows, at least one.
        config: longest response.
        stop_token_ids: ids that end a response.
        min_policy_version: servers older than this are refused.
    Raises: ShoalError: generation or scoring failed for good.
    """
    request = greedy_request(config, stop_token_ids, min_policy_version)
    tasks = [as_task(row, f"eval-v{min_policy_version}-r{row.row_index}") for row in rows]
    scored: list[ScoredGroup] = []
    async with aclosing(dispatcher.generate(tasks, request)) as finished:
        async for groups in finished:
            scored += await scorer.score(groups)
    return summarise(scored, len(rows))


def greedy_request(config: RolloutSection, stop_token_ids: tuple[int, ...], min_policy_version: int) -> GenerationRequest:
    """One sample per prompt at temperature 0."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=config.max_new_tokens, stop_token_ids=stop_token_ids)
    return GenerationRequest(sampling=sampling, num_samples=1, seed=None, min_policy_version=min_policy_version)


def summarise(scored: Sequence[ScoredGroup], num: int) -> Evaluation:
    """Count; see `Evaluation`."""
    results = [result for group in scored for result in group.results]
    values = [result.value for result in results if result.status is ScoreStatus.SCORED]
    spans = [span for group in scored for completion in group.group.completions for span in completion.policy_version_spans]
    return Evaluation(
        accuracy=sum(map(is_correct, results)) / num,
        mean_reward=sum(values) / len(values) if values else 0.0,
        policy_versions=tuple(sorted({span.policy_version for span in spans})),
        num=num,
        num_unscored=len(results) - len(values),
    )


def is_correct(result: ScoreResult) -> bool:
    """Whether a scored answer counts as correct."""
    return result.status is ScoreStatus.SCORED and result.components.get(CORRECT_COMPONENT, result.value) >= 1.0
