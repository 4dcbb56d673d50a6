"""The check of rows: which are chosen, what is found, how it is told, and that it neither fails nor holds up anything."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.row_check import (
    FILE_NAME,
    MAX_OPEN_CALLS,
    NUM_LOGGED,
    ROWS_PER_CALL,
    RowCheck,
    RowTally,
    RunRows,
    choose_rows,
)

from shoal.config.load import build_config
from shoal.errors import InternalError, InvalidRequestError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import FakeReward, FakeTokenizer, offered, reward_pool
from tests.helpers.routes import FakeRoutes, component, revision

LIMIT_S = 10.0


def make_row(index: int, answer: object = "4", **columns: object) -> PromptRow:
    row = {"answer": answer, **columns}
    return PromptRow(row_index=index, prompt_ids=np.array([5, 6], np.int32), text=f"question {index}", row=row)


def make_rows(train: Sequence[PromptRow], held_out: Sequence[PromptRow] = ()) -> RunRows:
    return RunRows(train=train, held_out=held_out, tokenizer=FakeTokenizer())


def by_answer(sample: ScoreSample) -> ScoreResult:
    """The answers `none`, `bad` and `wrong` are not scored, an error, and worth half; an empty one is declined too."""
    answer = sample.row["answer"]
    if answer in ("", "none"):
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED, message="no right answer")
    if answer == "bad":
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="DataError: cannot read it")
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.5 if answer == "wrong" else 1.0)


@dataclass
class Checking:
    """A check over scripted servers, and what it wrote."""

    folder: Path
    server: FakeReward = field(default_factory=lambda: FakeReward(by_answer))
    components: tuple[RouteComponent, ...] = ()
    max_s: float = LIMIT_S
    reward: dict[str, Any] = field(default_factory=dict)
    calls: ScorerCalls | None = None

    def __post_init__(self) -> None:
        tree = {
            "run": {"id": "run", "folder": str(self.folder), "steps": 1},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "reward": self.reward,
        }
        calls = self.calls or ScorerCalls(reward_pool(a=self.server), max_open_requests=8, is_live=False)
        self.check = RowCheck(build_config(tree), FakeRoutes(active=revision(*self.components)), calls, max_s=self.max_s)

    async def run(self, train: Sequence[PromptRow], held_out: Sequence[PromptRow] = ()) -> RowTally:
        self.check.set_rows(make_rows(train, held_out))
        self.check.begin()
        await asyncio.wait_for(self.check.run(), LIMIT_S)
        assert self.check.tally is not None
        return self.check.tally

    @asynccontextmanager
    async def running(self, train: Sequence[PromptRow]) -> AsyncIterator[asyncio.Task[None]]:
        self.check.set_rows(make_rows(train))
        self.check.begin()
        task = asyncio.create_task(self.check.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / FILE_NAME).read_text().splitlines()]


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.__dict__["shoal_fields"] for record in caplog.records if record.getMessage() == event]


async def test_rows_that_cannot_earn_a_reward_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checking = Checking(tmp_path)
    train = [make_row(3), make_row(4, "none"), make_row(7, "bad"), make_row(8, "")]
    tally = await checking.run(train, [make_row(0), make_row(1, "none")])
    assert (tally.num_checked, len(tally.unscored), len(tally.not_correct)) == (6, 4, 0)
    common = {"source": "", "scorer": "sum@3"}
    assert sorted(checking.lines(), key=lambda line: (line["data"], line["row_index"])) == [
        {"row_index": 1, "data": "held_out", "status": "not_scored", "message": "sum@3: no right answer"} | common,
        {"row_index": 4, "data": "train", "status": "not_scored", "message": "sum@3: no right answer"} | common,
        {"row_index": 7, "data": "train", "status": "error", "message": "sum@3: DataError: cannot read it"} | common,
        {"row_index": 8, "data": "train", "status": "not_scored", "message": "the row's right answer is empty; sum@3: no right answer"}
        | common,
    ]
    (warning,) = events(caplog, "rows_cannot_earn_a_reward")
    assert (warning["num_checked"], warning["num_unscored"], warning["file"]) == (6, 4, str(tmp_path / FILE_NAME))
    assert "train row 7: error by sum@3" in warning["first"]
    assert not events(caplog, "own_answers_are_not_correct")
    assert not events(caplog, "no_row_of_a_source_has_a_score")


async def test_rows_whose_own_answer_is_not_correct_are_another_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checking = Checking(tmp_path)
    tally = await checking.run([make_row(0, "wrong"), make_row(1)])
    assert (tally.num_checked, len(tally.unscored), len(tally.not_correct)) == (2, 0, 1)
    (line,) = checking.lines()
    assert (line["row_index"], line["scorer"], line["status"]) == (0, "sum@3", "not_correct")
    assert "gets 0.5; correct is from evaluation.correct_from 1 on" in line["message"]
    (warning,) = events(caplog, "own_answers_are_not_correct")
    assert (warning["num_not_correct"], len(warning["first"])) == (1, 1)
    assert not events(caplog, "rows_cannot_earn_a_reward")


async def test_good_rows_give_an_empty_file_and_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checking = Checking(tmp_path)
    await checking.run([make_row(0), make_row(1)])
    assert checking.lines() == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_file_of_an_earlier_coordinator_is_replaced(tmp_path: Path) -> None:
    await Checking(tmp_path).run([make_row(0, "none")])
    again = Checking(tmp_path)
    await again.run([make_row(0)])
    assert again.lines() == []


async def test_log_names_the_first_rows_alone_and_quotes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def long_error(sample: ScoreSample) -> ScoreResult:
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="x" * 1000)

    checking = Checking(tmp_path, FakeReward(long_error))
    await checking.run([make_row(index) for index in range(2 * NUM_LOGGED)])
    (warning,) = events(caplog, "rows_cannot_earn_a_reward")
    assert len(warning["first"]) == NUM_LOGGED
    assert not any("xx" in line for line in warning["first"])
    assert len(checking.lines()) == 2 * NUM_LOGGED


async def test_source_without_any_score_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checking = Checking(tmp_path)
    good, bad = {"data_source": "good"}, {"data_source": "bad"}
    rows = [make_row(0, **good), make_row(1, "none", **good), make_row(2, "none", **bad), make_row(3, "bad", **bad)]
    tally = await checking.run(rows)
    assert tally.barren_sources == ["bad"]
    (warning,) = events(caplog, "no_row_of_a_source_has_a_score")
    assert (warning["source"], warning["num_checked"]) == ("bad", 2)


async def test_row_is_scored_with_its_own_answer_by_the_components_of_its_source(tmp_path: Path) -> None:
    server = FakeReward(by_answer)
    components = (component("sum", sources=("a",)), component("exact", sources=("b",)), component("run", is_required=False))
    rows = [make_row(0, 12, data_source="a"), make_row(1, ["x", "y"], data_source="b")]
    await Checking(tmp_path, server, components).run(rows)
    seen = sorted(
        (name, sample.prompt, sample.response) for (name, _), call in zip(server.asked, server.calls, strict=True) for sample in call
    )
    assert seen == [("exact", "question 1", "x"), ("run", "question 0", "12"), ("run", "question 1", "x"), ("sum", "question 0", "12")]


async def test_ids_are_those_of_the_answer_and_an_empty_one_gives_way_to_the_prompt(tmp_path: Path) -> None:
    server = FakeReward(by_answer, scorers=offered("sum", needs_token_ids=True))
    await Checking(tmp_path, server).run([make_row(0, "46"), make_row(1, "")])
    (samples,) = server.calls
    assert [(sample.response, sample.response_ids, sample.num_response_tokens, sample.prompt_ids) for sample in samples] == [
        ("46", (52, 54), 2, (5, 6)),
        ("question 1", (5, 6), 2, (5, 6)),
    ]


async def test_optional_component_without_a_score_is_no_fault_of_the_row(tmp_path: Path) -> None:
    optional = component("exact", sources=("b",), is_required=False, timeout_s=0.01)
    components = (component("sum", sources=("a",)), component("run", sources=("b",)), optional)
    rows = [make_row(0, "none", data_source="a"), make_row(1, "4", data_source="b")]
    server = FakeReward(by_answer, scorers=offered("sum", "run"))
    tally = await Checking(tmp_path, server, components).run(rows)
    assert (tally.num_checked, [finding.row_index for finding in tally.unscored], tally.num_unreached) == (2, [0], 0)


async def test_scorer_of_the_fault_is_named_among_several(tmp_path: Path) -> None:
    def by_scorer(scorer: str, sample: ScoreSample) -> ScoreResult:
        status = ScoreStatus.NOT_SCORED if scorer == "exact" else ScoreStatus.SCORED
        return ScoreResult(sample_id=sample.sample_id, status=status, value=1.0)

    class TwoScorers(FakeReward):
        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            return version, [by_scorer(scorer, sample) for sample in samples]

    checking = Checking(tmp_path, TwoScorers(), (component("sum"), component("exact")))
    await checking.run([make_row(0)])
    assert [line["scorer"] for line in checking.lines()] == ["exact@3"]


@pytest.mark.parametrize("failure", [InvalidRequestError("no"), InternalError("500")])
async def test_call_that_fails_says_nothing_about_its_rows(tmp_path: Path, failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal")
    checking = Checking(tmp_path, FakeReward(by_answer, failures=[failure] * 1000), (component(timeout_s=0.02),))
    tally = await checking.run([make_row(0), make_row(1)])
    assert (tally.num_checked, tally.num_unreached, tally.findings, tally.barren_sources) == (0, 2, [], [])
    (event,) = events(caplog, "rows_checked")
    assert (event["num_unreached"], str(failure) in event["first_failure"]) == (2, True)


async def test_calls_are_few_and_small(tmp_path: Path) -> None:
    server = FakeReward(by_answer)
    tally = await Checking(tmp_path, server, (component(timeout_s=3.0),)).run([make_row(index) for index in range(5 * ROWS_PER_CALL + 1)])
    assert tally.num_checked == 5 * ROWS_PER_CALL + 1
    assert sorted(map(len, server.calls)) == [1] + 5 * [ROWS_PER_CALL]
    assert server.max_open <= MAX_OPEN_CALLS
    # Each row has the component's own deadline.
    assert max(server.timeouts_s) <= ROWS_PER_CALL * 3.0


async def test_check_ends_in_time_and_reports_what_it_has_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class HangsLater(FakeReward):
        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            if self.calls:
                self.gate = asyncio.Event()
            return await super().score(scorer, version, samples, timeout_s=timeout_s)

    caplog.set_level("INFO", "shoal")
    server = HangsLater(by_answer)
    checking = Checking(tmp_path, server, max_s=0.2)
    tally = await checking.run([make_row(index, "none") for index in range(4 * ROWS_PER_CALL)])
    assert (tally.num_checked, len(checking.lines()), server.num_open) == (ROWS_PER_CALL, ROWS_PER_CALL, 0)
    (event,) = events(caplog, "row_check_ended_early")
    assert (event["num_chosen"], event["num_checked"]) == (4 * ROWS_PER_CALL, ROWS_PER_CALL)
    assert events(caplog, "rows_cannot_earn_a_reward")


async def test_run_that_ends_before_the_check_still_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class HangsAtGoodRows(FakeReward):
        num_hanging = 0
        all_hang = asyncio.Event()

        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            if samples[0].row["answer"] != "none":
                self.num_hanging += 1
                if self.num_hanging == MAX_OPEN_CALLS:
                    self.all_hang.set()
                await asyncio.Event().wait()
            return await super().score(scorer, version, samples, timeout_s=timeout_s)

    server = HangsAtGoodRows(by_answer)
    # The call of the bad rows is over once all that may be open are of good ones.
    rows = [make_row(index, "none" if index < ROWS_PER_CALL else "4") for index in range(ROWS_PER_CALL * (1 + MAX_OPEN_CALLS))]
    async with Checking(tmp_path, server).running(rows):
        await asyncio.wait_for(server.all_hang.wait(), LIMIT_S)
    (warning,) = events(caplog, "rows_cannot_earn_a_reward")
    assert warning["num_unscored"] == ROWS_PER_CALL


async def test_nothing_is_asked_before_the_route_is_open_or_where_it_is_off(tmp_path: Path) -> None:
    checking = Checking(tmp_path)
    checking.check.set_rows(make_rows([make_row(0)]))
    waiting = asyncio.create_task(checking.check.run())
    await asyncio.sleep(0)
    assert not checking.server.calls
    checking.check.begin()
    await asyncio.wait_for(waiting, LIMIT_S)
    assert len(checking.server.calls) == 1
    off = Checking(tmp_path, reward={"check_rows": 0})
    off.check.set_rows(make_rows([make_row(0)]))
    off.check.begin()
    await asyncio.wait_for(off.check.run(), LIMIT_S)
    assert (off.server.calls, off.check.tally) == ([], None)


async def test_run_without_rows_is_not_checked(tmp_path: Path) -> None:
    checking = Checking(tmp_path)
    checking.check.begin()
    await asyncio.wait_for(checking.check.run(), LIMIT_S)
    assert checking.check.tally is None


async def test_check_that_breaks_is_logged_and_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
            raise ZeroDivisionError

    checking = Checking(tmp_path, calls=Broken())  # type: ignore[arg-type]
    assert (await checking.run([make_row(0)])).num_checked == 0
    assert "row_check_failed" in caplog.text
    caplog.clear()
    await Checking(tmp_path / "is no folder").run([make_row(0)])
    assert "row_check_failed" in caplog.text


def chosen(rows: RunRows, limit: int) -> list[tuple[str, str, int]]:
    return [(each.data, each.source, each.row.row_index) for kind in choose_rows(rows, limit, "data_source") for each in kind]


def test_rows_are_spread_over_the_data() -> None:
    assert chosen(make_rows([make_row(index) for index in range(100)]), 3) == [("train", "", 0), ("train", "", 50), ("train", "", 99)]


def test_rows_without_an_answer_are_skipped() -> None:
    without = PromptRow(row_index=1, prompt_ids=np.array([5], np.int32), text="q", row={"question": "?"})
    assert chosen(make_rows([make_row(0), without, make_row(2, None), make_row(3, "")]), 10) == [("train", "", 0), ("train", "", 3)]


def test_each_source_and_the_held_out_rows_have_their_part() -> None:
    train = [make_row(index, data_source="common") for index in range(1000)] + [make_row(1000, data_source="rare")]
    found = chosen(make_rows(train, [make_row(index, data_source="common") for index in range(500)]), 21)
    assert Counter((data, source) for data, source, _ in found) == {
        ("train", "rare"): 1,
        ("train", "common"): 10,
        ("held_out", "common"): 10,
    }


def test_no_more_rows_are_chosen_than_asked_for() -> None:
    assert len(chosen(make_rows([make_row(index, data_source=str(index)) for index in range(100)]), 7)) == 7
    assert chosen(make_rows([]), 7) == []
