"""Scores generated groups by the revisions of the route that they are pinned to; groups of the same scorer share calls.

"Not scored" is not 0: a sample whose scorer declined, raised, answered NaN or could not be reached keeps that status and reaches no
advantage. Nothing of that is raised: what becomes of a step with too many of them is decided by whoever asked (`unscored`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.types import ScoreResult, ScoreSample
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.calls import ScorerCalls, ServiceResult
from shoal_coordinator.rewards.combine import combine, with_parts
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.scored import ComponentResult, ScoredGroup
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.tokenizing import PromptTokenizer

_CallKey = tuple[str, str, str, float]


@dataclass(slots=True, kw_only=True)
class _Work:
    """A group with the components that score it. answers: by component, one per sample."""

    group: GeneratedGroup
    revision: RouteRevision
    components: tuple[RouteComponent, ...]
    samples: list[ScoreSample]
    answers: list[list[ServiceResult]]

    def by_sample(self) -> list[list[ComponentResult]]:
        """The components' results of each sample."""
        return [
            [
                with_parts(ComponentResult(component=component, service=own[place][0], result=own[place][1]))
                for component, own in zip(self.components, self.answers, strict=True)
            ]
            for place in range(len(self.samples))
        ]


class GroupScorer:
    """Scores groups; used from the event loop alone.

    Args:
        calls: the way to the reward servers.
        tokenizer: decodes responses.
        clock: counts open scoring as reward time.
        source_key: column that names a row's source.
    """

    def __init__(self, calls: ScorerCalls, tokenizer: PromptTokenizer, clock: StageClock, *, source_key: str = "data_source") -> None:
        self._calls = calls
        self._tokenizer = tokenizer
        self._clock = clock
        self._source_key = source_key

    async def score(self, groups: Sequence[tuple[GeneratedGroup, RouteRevision]]) -> list[ScoredGroup]:
        """Score groups, in order. Groups of one group_id, such as a prompt's samples and its greedy answer, are combined alike."""
        works = [self._work(group, revision) for group, revision in groups]
        if any(work.samples for work in works):
            with self._clock.measure(Stage.REWARD):
                await self._ask(works)
        combined = _combined(works)
        return [
            ScoredGroup(
                group=work.group,
                revision=work.revision.number,
                results=tuple(results),
                components=tuple(map(tuple, components)),
                samples=tuple(work.samples),
            )
            for work, (results, components) in zip(works, combined, strict=True)
        ]

    async def _ask(self, works: Sequence[_Work]) -> None:
        """Ask each scorer for all of its groups at once."""
        async with asyncio.TaskGroup() as asking:
            for component, places in _by_scorer(works):
                asking.create_task(self._ask_scorer(component, works, places))

    async def _ask_scorer(self, component: RouteComponent, works: Sequence[_Work], places: Sequence[tuple[int, int]]) -> None:
        answers = await self._calls.score_groups(component, [works[work].samples for work, _ in places])
        for (work, place), own in zip(places, answers, strict=True):
            works[work].answers[place] = own

    def _work(self, group: GeneratedGroup, revision: RouteRevision) -> _Work:
        components = revision.components_for(source_of(group, self._source_key))
        return _Work(group=group, revision=revision, components=components, samples=self._samples(group), answers=[[] for _ in components])

    def _samples(self, group: GeneratedGroup) -> list[ScoreSample]:
        texts = self._tokenizer.decode([completion.response_ids for completion in group.completions])
        prompt_ids = tuple(group.task.prompt_ids.tolist())
        return [
            ScoreSample(
                sample_id=f"{group.task.uid}/{completion.sample_index}/{group.attempt}",
                prompt=group.task.text,
                response=text,
                row=group.task.row,
                finish_reason=completion.finish_reason,
                num_response_tokens=completion.response_ids.size,
                prompt_ids=prompt_ids,
                response_ids=tuple(completion.response_ids.tolist()),
            )
            for completion, text in zip(group.completions, texts, strict=True)
        ]


def source_of(group: GeneratedGroup, source_key: str) -> str:
    """The source of a group's row; "" if it has none."""
    return str(group.task.row.get(source_key, ""))


def _by_scorer(works: Sequence[_Work]) -> Iterator[tuple[RouteComponent, list[tuple[int, int]]]]:
    """Each scorer with what it scores, as places (work, component of it); revisions that share one share its calls."""
    found: dict[_CallKey, tuple[RouteComponent, list[tuple[int, int]]]] = {}
    for number, work in enumerate(works):
        for place, component in enumerate(work.components):
            key = (component.scorer, component.version, component.fingerprint, component.timeout_s)
            found.setdefault(key, (component, []))[1].append((number, place))
    yield from found.values()


def _combined(works: Sequence[_Work]) -> list[tuple[list[ScoreResult], list[list[ComponentResult]]]]:
    """Rewards and components of each work; all that belong to a prompt are combined together, so that they can be compared."""
    prompts: dict[tuple[str, int], list[int]] = {}
    for number, work in enumerate(works):
        prompts.setdefault((work.group.task.group_id, work.revision.number), []).append(number)
    by_sample = [work.by_sample() for work in works]
    combined: list[tuple[list[ScoreResult], list[list[ComponentResult]]]] = [([], []) for _ in works]
    for numbers in prompts.values():
        samples = [sample for number in numbers for sample in works[number].samples]
        results = iter(combine(samples, [own for number in numbers for own in by_sample[number]]))
        for number in numbers:
            combined[number] = ([next(results) for _ in works[number].samples], by_sample[number])
    return combined
