"""Scores rows with their own answer as the response, beside the first steps of a run, and reports those that cannot earn a reward.

A row whose right answer is empty or unreadable has no score whatever the policy answers: its groups are lost. A row whose own answer is
not correct hints at a wrong right answer, or at a scorer that does not find it.

Invariants: nothing here fails or delays a run. Calls are not those of live groups, few are open at once, and after MAX_CHECK_S it ends.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from shoal.config.models import RunConfig
from shoal.telemetry.logs import get_logger
from shoal.types import Int32Array, ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.evaluation import is_correct
from shoal_coordinator.prompt_rows import ANSWER
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.rewards.admission import WarmUpCalls
from shoal_coordinator.rewards.combine import combine, name_of, with_parts
from shoal_coordinator.rewards.probes import ProbeTokenizer, answer_of, sample_of_row, source_of_row, spread
from shoal_coordinator.rewards.route import RouteRevision
from shoal_coordinator.rewards.scored import ComponentResult, RouteSource

log = get_logger(__name__)

FILE_NAME = "unscored_rows.jsonl"
MAX_CHECK_S = 120.0
ROWS_PER_CALL = 8
MAX_OPEN_CALLS = 2
NOT_CORRECT = "not_correct"
NUM_LOGGED = 10
TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """The rows of a run, and what gives the ids of their answers."""

    train: Sequence[PromptRow]
    held_out: Sequence[PromptRow]
    tokenizer: ProbeTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRow:
    """A row to check. data: train or held_out. source: of reward.sources; "" without one."""

    data: str
    source: str
    row: PromptRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinding:
    """A line of the file: what is wrong with a row. row_index counts from 0 over the rows of data.train or data.held_out.

    status: not_scored, error, or not_correct: scored, but below evaluation.correct_from.
    """

    row_index: int
    data: str
    source: str
    scorer: str
    status: str
    message: str


@dataclass(slots=True, kw_only=True)
class RowTally:
    """What has been found so far. num_unreached: rows that are not counted as checked, since no server answered for them."""

    num_chosen: int = 0
    num_unreached: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    findings: list[RowFinding] = field(default_factory=list)
    first_failure: str = ""

    @property
    def num_checked(self) -> int:
        """Rows for which scorers have answered."""
        return self.checked.total()

    @property
    def unscored(self) -> list[RowFinding]:
        """Rows without a score."""
        return [finding for finding in self.findings if finding.status != NOT_CORRECT]

    @property
    def not_correct(self) -> list[RowFinding]:
        """Rows whose own answer is scored, but not as correct."""
        return [finding for finding in self.findings if finding.status == NOT_CORRECT]

    @property
    def barren_sources(self) -> list[str]:
        """Sources of which no row has a score."""
        unscored = Counter(finding.source for finding in self.unscored)
        return sorted(source for source, number in self.checked.items() if unscored[source] == number)


class RowCheck:
    """Checks rows once; `run` must be running.

    Args:
        config: reward.check_rows, evaluation.correct_from, data.source_key, run.folder.
        routes: the revision that is active when the check begins scores all rows.
        calls: the way to the servers; not that of live groups, which must not wait for its turns.
        max_s: what is not done by then stays undone, in seconds.
    """

    def __init__(self, config: RunConfig, routes: RouteSource, calls: WarmUpCalls, *, max_s: float = MAX_CHECK_S) -> None:
        self._config = config
        self._routes = routes
        self._calls = calls
        self._max_s = max_s
        self._rows: RunRows | None = None
        self._may_begin = asyncio.Event()
        self.tally: RowTally | None = None

    def set_rows(self, rows: RunRows) -> None:
        """The data has been loaded."""
        self._rows = rows

    def begin(self) -> None:
        """The route is open: scorers can be asked."""
        self._may_begin.set()

    async def run(self) -> None:
        """Wait until the route is open, check, report; raises nothing but cancellation, which reports what has been found."""
        await self._may_begin.wait()
        rows, self._rows = self._rows, None
        if rows is None or not self._config.reward.check_rows:
            return
        try:
            await self._check(rows)
        except Exception:  # a report about the data must not end a run
            log.exception("row_check_failed")

    async def _check(self, rows: RunRows) -> None:
        # In a thread: there may be millions of rows.
        chosen = await asyncio.to_thread(choose_rows, rows, self._config.reward.check_rows, self._config.data.source_key)
        tally = self.tally = RowTally(num_chosen=sum(map(len, chosen)))
        path = Path(self._config.run.folder) / FILE_NAME
        try:
            with path.open("w", encoding="utf-8") as file:
                checker = _Checker(self._routes.active, self._calls, rows.tokenizer, self._config.evaluation.correct_from, tally, file)
                async with asyncio.timeout(self._max_s):
                    await checker.check(chosen)
        except TimeoutError:
            log.info("row_check_ended_early", max_s=self._max_s, num_chosen=tally.num_chosen, num_checked=tally.num_checked)
        finally:
            _report(tally, path)


class _Checker:
    """Scores the chosen rows of one check."""

    def __init__(
        self,
        revision: RouteRevision,
        calls: WarmUpCalls,
        tokenizer: ProbeTokenizer,
        correct_from: float,
        tally: RowTally,
        file: TextIO,
    ) -> None:
        self._revision = revision
        self._calls = calls
        self._tokenizer = tokenizer
        self._correct_from = correct_from
        self._tally = tally
        self._file = file

    async def check(self, chosen: Sequence[Sequence[ChosenRow]]) -> None:
        """Score all of them, a few calls at once."""
        parts = iter(list(_parts(chosen)))
        async with asyncio.TaskGroup() as workers:
            for _ in range(MAX_OPEN_CALLS):
                workers.create_task(self._work(parts))

    async def _work(self, parts: Iterator[Sequence[ChosenRow]]) -> None:
        for part in parts:
            await self._score(part)
            self._file.flush()

    async def _score(self, rows: Sequence[ChosenRow]) -> None:
        """Score rows of one source, each as a group of its own: within the component's deadline for each."""
        samples = self._samples(rows)
        components = self._revision.components_for(rows[0].source)
        answers = [(component, *await self._calls.score(component, samples, len(samples))) for component in components]
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            own = [
                with_parts(ComponentResult(component=component, service=service, result=results[place]))
                for component, service, results in answers
            ]
            self._note(row, sample, own)

    def _samples(self, rows: Sequence[ChosenRow]) -> list[ScoreSample]:
        answers = [answer_of(each.row) for each in rows]
        ids = self._tokenizer.encode(answers)
        return [_sample(each, answer, own) for each, answer, own in zip(rows, answers, ids, strict=True)]

    def _note(self, row: ChosenRow, sample: ScoreSample, own: Sequence[ComponentResult]) -> None:
        tally = self._tally
        unreached = next(filter(_is_unreached, own), None)
        if unreached is not None:
            tally.num_unreached += 1
            tally.first_failure = tally.first_failure or unreached.result.message
            return
        tally.checked[row.source] += 1
        (result,) = combine([sample], [own])
        finding = self._finding(row, result, own)
        if finding is not None:
            tally.findings.append(finding)
            self._file.write(json.dumps(asdict(finding)) + "\n")

    def _finding(self, row: ChosenRow, result: ScoreResult, own: Sequence[ComponentResult]) -> RowFinding | None:
        if is_correct(result, self._correct_from):
            return None
        status, message = str(result.status), result.message
        if result.status is ScoreStatus.SCORED:
            status = NOT_CORRECT
            message = f"the row's own answer gets {result.value:g}; correct is from evaluation.correct_from {self._correct_from:g} on"
        if not answer_of(row.row).strip():
            message = f"the row's right answer is empty; {message}"
        blamed = [each for each in own if each.component.is_required and each.result.status is result.status]
        scorers = [name_of(each) for each in (own if result.status is ScoreStatus.SCORED else blamed)]
        return RowFinding(
            row_index=row.row.row_index, data=row.data, source=row.source, scorer=", ".join(scorers), status=status, message=message
        )


def choose_rows(rows: RunRows, limit: int, source_key: str) -> list[list[ChosenRow]]:
    """Choose rows with an answer, spread over the data; as many of each source, in training and held-out rows, as far as there are.

    Args:
        rows: of the run.
        limit: how many at most.
        source_key: column that names a row's source.
    Returns: the rows of each source, training and held-out rows apart.
    """
    kinds: dict[tuple[str, str], list[PromptRow]] = {}
    for data, own in ((TRAIN, rows.train), (HELD_OUT, rows.held_out)):
        for row in own:
            if row.row.get(ANSWER) is not None:
                kinds.setdefault((data, source_of_row(row.row, source_key)), []).append(row)
    chosen: list[list[ChosenRow]] = []
    left = limit
    # The smallest first: what they do not use the others get.
    for number, ((data, source), own) in enumerate(sorted(kinds.items(), key=lambda kind: len(kind[1]))):
        few = spread(own, left // (len(kinds) - number))
        left -= len(few)
        chosen.append([ChosenRow(data=data, source=source, row=row) for row in few])
    return chosen


def _parts(chosen: Sequence[Sequence[ChosenRow]]) -> Iterator[Sequence[ChosenRow]]:
    """The rows of each call, of the sources in turns: a check that ends early has seen them all."""
    longest = max(map(len, chosen), default=0)
    for start in range(0, longest, ROWS_PER_CALL):
        yield from (own[start : start + ROWS_PER_CALL] for own in chosen if start < len(own))


def _sample(chosen: ChosenRow, answer: str, response_ids: Int32Array) -> ScoreSample:
    name = f"probe-{chosen.data}-r{chosen.row.row_index}/0/1"
    if answer.strip() and response_ids.size:
        return sample_of_row(chosen.row, answer, response_ids, name)
    # A response has a token at least; without a right answer none is correct, whatever it is.
    return sample_of_row(chosen.row, chosen.row.text, chosen.row.prompt_ids, name)


def _is_unreached(each: ComponentResult) -> bool:
    """Whether the call failed, which says nothing about the row; the calls then say so in these words."""
    has_failed = each.result.status is ScoreStatus.ERROR and each.result.message.startswith(f"{name_of(each)} failed")
    return has_failed and each.component.is_required


def _report(tally: RowTally, path: Path) -> None:
    log.info("rows_checked", num_checked=tally.num_checked, num_unreached=tally.num_unreached, first_failure=tally.first_failure)
    if tally.unscored:
        log.warning(
            "rows_cannot_earn_a_reward",
            num_checked=tally.num_checked,
            num_unscored=len(tally.unscored),
            first=_first(tally.unscored),
            file=str(path),
            fix="mend their right answers or remove them: whatever the policy answers, their groups have no score",
        )
    for source in tally.barren_sources:
        log.warning(
            "no_row_of_a_source_has_a_score",
            source=source,
            num_checked=tally.checked[source],
            fix="look at data.answer_key and at the scorer of this source: the run will pause",
        )
    if tally.not_correct:
        log.warning(
            "own_answers_are_not_correct",
            num_checked=tally.num_checked,
            num_not_correct=len(tally.not_correct),
            first=_first(tally.not_correct),
            file=str(path),
            fix="look at them: is the right answer wrong, or does the scorer not find it? Nothing is wrong if the scorer gives no verdicts",
        )


def _first(findings: Sequence[RowFinding]) -> list[str]:
    # The messages are for the file alone: they may quote the row.
    return [f"{each.data} row {each.row_index}: {each.status} by {each.scorer}" for each in findings[:NUM_LOGGED]]
