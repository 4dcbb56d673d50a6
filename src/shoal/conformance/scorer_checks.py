"""Checks of one scorer of a server.

The first call is the reference: the other checks compare with its results, so nothing else is checked if it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from shoal.conformance import samples as made
from shoal.conformance.probe import Answer, Probe
from shoal.conformance.report import Check, Problem, failure, ok, warning
from shoal.conformance.results import count_words, furthest
from shoal.conformance.server_checks import label
from shoal.errors import DeadlineError, UnavailableError
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus

EXACT = 1e-9
ROUNDING = 1e-2
"""Above it, a difference between a sample's scores is not the rounding of a model whose batches are computed in another order."""
LARGE_BATCH = 512
SHORT_DEADLINE_S = 0.05

_MAX_SINGLES = 4
_BATCH_SHARE = 0.5
_SLOW_AFTER_S = 1.0
_GIVE_UP_AFTER = 2


class ScorerChecks:
    """Checks one scorer, one call after the other unless a check is about calls at once."""

    def __init__(
        self, probe: Probe, scorer: ScorerDescription, given: Sequence[ScoreSample], *, versions: Sequence[str], large_batch: int
    ) -> None:
        """Prepare the checks.

        Args:
            given: what to score; made samples if empty.
            versions: every version that the server offers of this scorer.
            large_batch: samples of the largest batch.
        """
        self._probe = probe
        self._scorer = scorer
        self._versions = versions
        self._num_large = large_batch
        self._samples = made.choose_samples(given, needs_token_ids=scorer.needs_token_ids)
        self._label = label(scorer)
        self._is_exact = True
        self._reference: dict[str, ScoreResult] = {}
        self._sample_s = 0.0
        self._num_lost = 0

    async def run(self) -> list[Check]:
        """Make all checks of the scorer."""
        checks = [await self._batch()]
        if not self._reference:
            return checks
        checks.append(self._check_that_something_is_scored())
        steps: list[Callable[[], Awaitable[Check]]] = [
            self._same_twice,
            self._newest_version,
            self._empty_batch,
            self._singles,
            self._split,
            self._permuted,
            self._at_once,
            self._unscorable,
            self._odd_texts,
            self._large_sample,
            self._large_batch,
            self._short_deadline,
        ]
        for index, step in enumerate(steps):
            if self._num_lost >= _GIVE_UP_AFTER:
                fix = "repair what failed above, then check again"
                return [*checks, self._warning("the rest", f"{len(steps) - index} checks were left out: the server answers no more", fix)]
            checks += [await step()]
        return checks

    async def _score(self, samples: Sequence[ScoreSample], *, timeout_s: float | None = None, version: str | None = None) -> Answer:
        asked = self._scorer.version if version is None else version
        answer = await self._probe.score(self._scorer.name, asked, samples, timeout_s=timeout_s)
        if timeout_s is None:
            self._num_lost = self._num_lost + 1 if isinstance(answer.error, DeadlineError | UnavailableError) else 0
        return answer

    async def _batch(self) -> Check:
        name, answer = "one batch", await self._score(self._samples)
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        if answer.version != self._scorer.version:
            what = f"version {self._scorer.version!r} was asked for, the answer says {answer.version!r}"
            return self._failure(name, Problem(what=what, fix="score with the version that was asked for, and name it in the answer"))
        self._reference = {result.sample_id: result for result in answer.results}
        self._sample_s = answer.duration_s / len(self._samples)
        return self._ok(name, f"{count_words(answer.results)} in {answer.duration_s * 1e3:.0f} ms")

    def _check_that_something_is_scored(self) -> Check:
        name, results = "a sample is scored", list(self._reference.values())
        if any(result.status is ScoreStatus.SCORED for result in results):
            return self._ok(name, count_words(results))
        message = next((f", such as: {result.message[:200]}" for result in results if result.message), "")
        fix = "give rows that it can score with --data FILE.jsonl; without a score the comparisons below compare statuses only"
        return self._warning(name, f"{count_words(results)}{message}", fix)

    async def _same_twice(self) -> Check:
        name, answer = "same twice", await self._score(self._samples)
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        # The first call may have waited for imports and models.
        self._sample_s = min(self._sample_s, answer.duration_s / len(self._samples))
        apart, words = furthest(self._pairs([answer]))
        if apart <= EXACT:
            return self._ok(name, "the same batch got the same scores")
        self._is_exact = False
        fix = "seed what it draws, or keep in mind that its scores are samples: a retried call may reward the same answer otherwise"
        return self._warning(name, f"the same batch got other scores: {words}", fix)

    async def _newest_version(self) -> Check:
        name, answer = "version left out", await self._score(self._samples[:1], version="")
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        if answer.version not in self._versions:
            what = f"the answer names version {answer.version!r}, offered are {', '.join(self._versions)}"
            return self._failure(name, Problem(what=what, fix="name the version that scored in the answer"))
        return self._ok(name, f"{answer.version} scores")

    async def _empty_batch(self) -> Check:
        name, answer = "empty batch", await self._score(())
        if (problem := answer.problem) is None:
            return self._ok(name, "no results")
        fix = "answer an empty batch with the scorer, its version and no results"
        return self._failure(name, problem if isinstance(answer.error, DeadlineError | UnavailableError) else replace(problem, fix=fix))

    async def _singles(self) -> Check:
        answers = [await self._score([sample]) for sample in self._samples[:_MAX_SINGLES]]
        return self._equal("batch equals single", answers, "samples one by one", "let no sample's score depend on the others in its batch")

    async def _split(self) -> Check:
        middle = (len(self._samples) + 1) // 2
        answers = [await self._score(part) for part in (self._samples[:middle], self._samples[middle:])]
        return self._equal("split batch", answers, "the two halves", "let no sample's score depend on the others in its batch")

    async def _permuted(self) -> Check:
        answers = [await self._score(self._samples[::-1])]
        return self._equal("other order", answers, "the reverse order", "let no sample's score depend on its place in the batch")

    async def _at_once(self) -> Check:
        answers = await asyncio.gather(*(self._score(self._samples) for _ in range(4)))
        return self._equal("calls at once", answers, "4 calls at once", "let calls share no state: Shoal scores several groups at once")

    async def _unscorable(self) -> Check:
        name, good = "rows it cannot score", self._samples[0]
        bad = made.unscorable_samples(good)
        mixed = made.numbered([good, *bad])
        answer = await self._score(mixed)
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        kept, others = answer.results[0], answer.results[1:]
        apart, words = furthest([(self._reference[good.sample_id], kept)])
        if self._is_exact and apart > ROUNDING:
            fix = "let a sample that cannot be scored be an error of that sample only"
            return self._failure(name, Problem(what=f"a good sample beside them changed: {words}", fix=fix))
        return self._ok(name, f"{count_words(others)}; the call and the sample beside them are unharmed")

    async def _odd_texts(self) -> Check:
        answer = await self._score(made.odd_samples(self._samples[0]))
        return self._survived("odd text", answer, "null bytes, right-to-left, emoji, 10,000 braces")

    async def _large_sample(self) -> Check:
        answer = await self._score([made.large_sample(self._samples[0])])
        return self._survived("large sample", answer, "1 MiB")

    def _survived(self, name: str, answer: Answer, what: str) -> Check:
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        return self._ok(name, f"{what}: {count_words(answer.results)} in {answer.duration_s * 1e3:.0f} ms")

    async def _large_batch(self) -> Check:
        name, number = "large batch", self._affordable()
        samples = made.repeated(self._samples, number)
        answer = await self._score(samples)
        if answer.problem is not None:
            return self._failure(name, answer.problem)
        originals = [self._samples[index % len(self._samples)].sample_id for index in range(number)]
        pairs = [(self._reference[original], result) for original, result in zip(originals, answer.results, strict=True)]
        found = f"{number} samples in {answer.duration_s:.2f} s, {number / max(answer.duration_s, 1e-6):.0f} a second"
        if number < self._num_large:
            fix = f"scale it out, or give its component a timeout_s that fits: {self._num_large} samples would not be done in time"
            return self._warning(name, f"{found}; the deadline is {self._probe.timeout_s:g} s", fix)
        return self._judge(name, pairs, found, "let no sample's score depend on the size of its batch")

    def _affordable(self) -> int:
        possible = int(_BATCH_SHARE * self._probe.timeout_s / max(self._sample_s, 1e-9))
        return max(1, min(self._num_large, possible))

    async def _short_deadline(self) -> Check:
        name = "short deadline"
        answer = await self._score(made.repeated(self._samples, self._affordable()), timeout_s=SHORT_DEADLINE_S)
        if answer.error is not None and not isinstance(answer.error, DeadlineError):
            return self._failure(name, self._late(f"{type(answer.error).__name__.removesuffix('Error')}: {str(answer.error)[:200]}"))
        if answer.duration_s > SHORT_DEADLINE_S + _SLOW_AFTER_S:
            return self._failure(name, self._late(f"an answer after {answer.duration_s:.2f} s"))
        after = await self._score(self._samples[:1])
        if after.problem is not None:
            what = f"the call after one that ran out of time got no answer: {after.problem.what}"
            return self._failure(name, Problem(what=what, fix="stop working for a caller that has gone, so that the next one is served"))
        how = "DEADLINE_EXCEEDED" if answer.error is not None else f"answered in time, {count_words(answer.results)}"
        if after.duration_s > _SLOW_AFTER_S + 2 * self._sample_s * len(self._samples):
            fix = "stop working for a caller that has gone (context.time_remaining(), context.is_active())"
            return self._warning(name, f"{how}; the next call took {after.duration_s:.1f} s", fix)
        return self._ok(name, f"{SHORT_DEADLINE_S * 1e3:.0f} ms: {how}; the next call was answered")

    @staticmethod
    def _late(found: str) -> Problem:
        what = f"a call with {SHORT_DEADLINE_S * 1e3:.0f} ms to go ended with {found}"
        return Problem(what=what, fix="end a call at its deadline with DEADLINE_EXCEEDED, or answer in time with error results")

    def _equal(self, name: str, answers: Sequence[Answer], what: str, fix: str) -> Check:
        if (problem := next((answer.problem for answer in answers if answer.problem is not None), None)) is not None:
            return self._failure(name, problem)
        return self._judge(name, self._pairs(answers), what, fix)

    def _judge(self, name: str, pairs: Sequence[tuple[ScoreResult, ScoreResult]], what: str, fix: str) -> Check:
        apart, words = furthest(pairs)
        if apart <= EXACT:
            return self._ok(name, f"{what}: the same scores")
        if not self._is_exact:
            return self._warning(name, f"{what}: other scores, as for the same batch twice", "see `same twice`")
        if apart <= ROUNDING:
            less = "fine for a model, whose batches round otherwise (in float32 less); else " + fix
            return self._warning(name, f"{what}: scores differ by {apart:.1g} of their size ({words})", less)
        return self._failure(name, Problem(what=f"{what}: other scores ({words})", fix=fix))

    def _pairs(self, answers: Sequence[Answer]) -> list[tuple[ScoreResult, ScoreResult]]:
        return [(self._reference[result.sample_id], result) for answer in answers for result in answer.results]

    def _ok(self, name: str, detail: str) -> Check:
        return ok(name, detail, scorer=self._label)

    def _warning(self, name: str, detail: str, fix: str) -> Check:
        return warning(name, detail, fix, scorer=self._label)

    def _failure(self, name: str, problem: Problem) -> Check:
        return failure(name, problem, scorer=self._label)
