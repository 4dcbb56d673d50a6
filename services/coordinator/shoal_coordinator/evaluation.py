"""Accuracy over held-out rows, through the same rollout servers and scorers as training, with sampling settings of its own.

An evaluation is scored by one revision of the reward route. Where too many samples have no score the run pauses with an alert; once it is
resumed they are scored again, or everything is if another revision has become active meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from shoal.config.models import RolloutSection, RunConfig
from shoal.types import FinishReason, SamplingParams, ScoreResult, ScoreStatus
from shoal_coordinator.alerts import Attention
from shoal_coordinator.dispatcher import Dispatcher, GeneratedGroup, GenerationRequest
from shoal_coordinator.prompts import PromptRow, as_task
from shoal_coordinator.rewards.scored import RoutePin, RouteSource, ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.rewards.unscored import is_whole, num_unscored, unscored_alert

CORRECT_COMPONENT = "correct"
"""A scorer that gives this component decides with it; otherwise its reward does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of one evaluation.

    accuracy: mean over rows of the share of right answers; empty, missing and unscored answers count as wrong.
    mean_reward: over the scored answers, 0 without any. policy_versions: all that generated an answer.
    num: answers asked for, num_rows x samples. num_unscored: answers that no scorer could score.
    best_of_samples: share of rows with at least one right answer; None for one answer per row.
    mean_length: tokens of an answer. truncated_share: answers that the length limit ended. Both over the answers that came.
    source_accuracy: accuracy of each source of reward.sources. reward_revision: revision of the reward route; 0 where it is not known.
    """

    accuracy: float
    mean_reward: float
    policy_versions: tuple[int, ...]
    num: int
    num_unscored: int
    num_rows: int = 0
    samples: int = 1
    best_of_samples: float | None = None
    mean_length: float = 0.0
    truncated_share: float = 0.0
    source_accuracy: dict[str, float] = field(default_factory=dict)
    reward_revision: int = 0

    def metrics(self) -> dict[str, float]:
        """The numbers by name, for logs, reports and metric sinks."""
        metrics = {
            "accuracy": self.accuracy,
            "mean_reward": self.mean_reward,
            "mean_length": self.mean_length,
            "truncated_share": self.truncated_share,
            "num_rows": float(self.num_rows),
            "samples": float(self.samples),
            "num_unscored": float(self.num_unscored),
            "reward_revision": float(self.reward_revision),
        }
        if self.best_of_samples is not None:
            metrics["best_of_samples"] = self.best_of_samples
        return metrics | {f"accuracy_{source}": accuracy for source, accuracy in self.source_accuracy.items()}


async def evaluate(
    rows: Sequence[PromptRow],
    dispatcher: Dispatcher,
    scorer: GroupScorer,
    config: RunConfig,
    *,
    routes: RouteSource,
    attention: Attention,
    stop_token_ids: tuple[int, ...],
    min_policy_version: int = 0,
) -> Evaluation:
    """Generate evaluation.samples answers per row and score them.

    The seeds come from run.seed, the policy version and the row, so a version that is evaluated again is evaluated alike.

    Args:
        rows: held-out rows, at least one.
        config: its section `evaluation` says how to sample and what is correct.
        routes: the revision that is active now scores everything.
        attention: pauses the run.
        stop_token_ids: ids that end a response.
        min_policy_version: servers older than this are refused.
    Raises:
        StoppedWhilePausedError: the run was stopped while it was paused for unscored samples.
        ShoalError: generation failed for good.
    """
    request = evaluation_request(config, stop_token_ids, min_policy_version)
    tasks = [as_task(row, f"eval-v{min_policy_version}-r{row.row_index}") for row in rows]
    with _EvaluationScores(scorer, routes, attention, config.reward.max_unscored_share) as scores:
        async with aclosing(dispatcher.generate(tasks, request)) as finished:
            async for groups in finished:
                await scores.add(groups, len(tasks) * request.num_samples)
        await scores.close()
        return summarise(scores.scored, config)


class _EvaluationScores:
    """The scores of an evaluation so far, all of one revision, which it keeps pinned."""

    def __init__(self, scorer: GroupScorer, routes: RouteSource, attention: Attention, max_unscored_share: float) -> None:
        self._scorer = scorer
        self._routes = routes
        self._attention = attention
        self._max_unscored_share = max_unscored_share
        self._pin: RoutePin = routes.pin()
        self.scored: list[ScoredGroup] = []

    def __enter__(self) -> _EvaluationScores:
        return self

    def __exit__(self, *_: object) -> None:
        self._pin.release()

    async def add(self, groups: Sequence[GeneratedGroup], num_samples: int) -> None:
        """Score groups; pause early if too many of the evaluation's num_samples will have no score."""
        self.scored += await self._score(groups)
        while num_unscored(self.scored) > self._max_unscored_share * num_samples:
            await self._pause_and_score_again(num_samples)

    async def close(self) -> None:
        """All groups have come: pause if too many have no score, or all of them."""
        num_samples = sum(len(group.results) for group in self.scored)
        while (missing := num_unscored(self.scored)) and (missing == num_samples or missing > self._max_unscored_share * num_samples):
            await self._pause_and_score_again(num_samples)

    async def _pause_and_score_again(self, num_samples: int) -> None:
        what = (
            f"{num_unscored(self.scored)} of {num_samples} samples of the evaluation have no score; reward.max_unscored_share is "
            f"{self._max_unscored_share:g}"
        )
        await self._attention.wait_for_resume(unscored_alert(self.scored, what))
        old, self._pin = self._pin, self._routes.pin()
        old.release()
        is_other = self._pin.revision.number != old.revision.number
        kept = [] if is_other else [group for group in self.scored if is_whole(group)]
        again = [group.group for group in self.scored if is_other or not is_whole(group)]
        self.scored = kept + await self._score(again)

    async def _score(self, groups: Sequence[GeneratedGroup]) -> list[ScoredGroup]:
        scored = await self._scorer.score([(group, self._pin.revision) for group in groups])
        # The texts have been scored, and an evaluation may be long.
        return [replace(group, samples=()) for group in scored]


def evaluation_request(config: RunConfig, stop_token_ids: tuple[int, ...], min_policy_version: int) -> GenerationRequest:
    """Sampling of the section `evaluation`; greedy answers need no seed."""
    evaluation = config.evaluation
    new_tokens = config.rollout.max_new_tokens if evaluation.max_new_tokens is None else evaluation.max_new_tokens
    sampling = SamplingParams(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        max_new_tokens=new_tokens,
        stop_token_ids=stop_token_ids,
    )
    seed = None if evaluation.temperature == 0 else config.run.seed
    return GenerationRequest(sampling=sampling, num_samples=evaluation.samples, seed=seed, min_policy_version=min_policy_version)


def greedy_request(config: RolloutSection, stop_token_ids: tuple[int, ...], min_policy_version: int) -> GenerationRequest:
    """One answer per prompt at temperature 0, as long as those of training: the baseline of remax."""
    sampling = SamplingParams(
        temperature=0.0,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        stop_token_ids=() if config.ignore_eos else stop_token_ids,
        ignore_eos=config.ignore_eos,
    )
    return GenerationRequest(sampling=sampling, num_samples=1, seed=None, min_policy_version=min_policy_version)


def summarise(scored: Sequence[ScoredGroup], config: RunConfig) -> Evaluation:
    """Count; see `Evaluation`.

    Args:
        scored: one group per row, at least one.
        config: number of samples, limit of a correct answer, sources.
    """
    samples = config.evaluation.samples
    results = [result for group in scored for result in group.results]
    values = [result.value for result in results if result.status is ScoreStatus.SCORED]
    completions = [completion for group in scored for completion in group.group.completions]
    # An answer without tokens did come: its length is 0.
    num_came = len(completions) + sum(group.group.num_empty for group in scored)
    num_right = [sum(is_correct(result, config.evaluation.correct_from) for result in group.results) for group in scored]
    return Evaluation(
        accuracy=sum(num_right) / (len(scored) * samples),
        mean_reward=_mean(values),
        policy_versions=tuple(sorted({span.policy_version for each in completions for span in each.policy_version_spans})),
        num=len(scored) * samples,
        num_unscored=len(results) - len(values),
        num_rows=len(scored),
        samples=samples,
        best_of_samples=None if samples == 1 else _mean([float(right > 0) for right in num_right]),
        mean_length=sum(completion.response_ids.size for completion in completions) / max(1, num_came),
        truncated_share=sum(completion.finish_reason is FinishReason.LENGTH for completion in completions) / max(1, num_came),
        source_accuracy=_by_source(scored, num_right, config) if config.reward.sources else {},
        reward_revision=scored[0].revision,
    )


def is_correct(result: ScoreResult, correct_from: float = 1.0) -> bool:
    """Whether a scored answer counts as correct: its component `correct`, else its reward, reaches correct_from."""
    return result.status is ScoreStatus.SCORED and result.components.get(CORRECT_COMPONENT, result.value) >= correct_from


def _by_source(scored: Sequence[ScoredGroup], num_right: Iterable[int], config: RunConfig) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for group, right in zip(scored, num_right, strict=True):
        shares.setdefault(str(group.group.task.row[config.data.source_key]), []).append(right / config.evaluation.samples)
    return {source: _mean(own) for source, own in sorted(shares.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
