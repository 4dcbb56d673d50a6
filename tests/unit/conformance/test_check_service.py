"""Conformance without a wire: any endpoint will do, and nothing that it does is an exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from shoal.conformance import CheckLevel, check_service
from shoal.conformance.results import difference, result_problem
from shoal.errors import DeadlineError, NotFoundError
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.scoring import make_sample, make_samples

LENGTH = ScorerDescription(name="length", version="1", description="", fingerprint="f")
Scored = tuple[str, Sequence[ScoreResult]]


def by_length(samples: Sequence[ScoreSample]) -> list[ScoreResult]:
    return [ScoreResult(sample_id=s.sample_id, status=ScoreStatus.SCORED, value=float(len(s.response))) for s in samples]


@dataclass(slots=True)
class Fake:
    """An endpoint in memory; keeps the calls."""

    scorers: Sequence[ScorerDescription] = (LENGTH,)
    behaviour: Callable[[Sequence[ScoreSample]], list[ScoreResult]] = by_length
    calls: list[tuple[str, str, tuple[ScoreSample, ...], float]] = field(default_factory=list)

    async def describe(self, *, timeout_s: float) -> Sequence[ScorerDescription]:
        return self.scorers

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> Scored:
        self.calls.append((scorer, version, tuple(samples), timeout_s))
        if not any(offered.name == scorer and version in ("", offered.version) for offered in self.scorers):
            raise NotFoundError("no such scorer")
        return version or "1", self.behaviour(samples)


async def test_a_right_endpoint_passes() -> None:
    report = await check_service(Fake(), timeout_s=5)
    assert {check.level for check in report.checks} == {CheckLevel.OK}


async def test_given_samples_are_scored_under_ids_that_differ() -> None:
    fake, given = Fake(), [make_sample(0, response=f"answer {i}") for i in range(40)]
    assert (await check_service(fake, samples=given, timeout_s=5)).passed
    batch = max((call[2] for call in fake.calls if call[3] == 5 and len(call[2]) <= 16), key=len)
    assert [sample.response for sample in batch] == [f"answer {i}" for i in range(16)]
    assert len({sample.sample_id for sample in batch}) == 16


async def test_the_largest_batch_can_be_chosen() -> None:
    fake = Fake()
    assert (await check_service(fake, timeout_s=5, large_batch=20)).passed
    assert max(len(call[2]) for call in fake.calls) == 20


async def test_a_scorer_that_needs_token_ids_gets_them_in_every_sample() -> None:
    fake = Fake(scorers=[replace(LENGTH, needs_token_ids=True)])
    assert (await check_service(fake, samples=make_samples(["a", "b"]), timeout_s=5)).passed
    samples = [sample for scorer, version, call, _ in fake.calls if scorer == "length" and version in ("", "1") for sample in call]
    assert all(sample.prompt_ids and len(sample.response_ids) == sample.num_response_tokens for sample in samples)


@pytest.mark.parametrize(
    ("wanted", "checked", "fixes"),
    [
        ([("length", "")], {"length@1", "length@2"}, []),
        ([("length", "2")], {"length@2"}, []),
        ([("lenght", "")], {"lenght"}, ["did you mean length? there is: length@1, length@2, other@1"]),
        ([("length", "7"), ("other", "1")], {"length@7", "other@1"}, ["there is: length@1, length@2, other@1"]),
    ],
)
async def test_wanted_scorers_are_checked_and_missing_ones_are_failures(
    wanted: list[tuple[str, str]], checked: set[str], fixes: list[str]
) -> None:
    fake = Fake(scorers=[LENGTH, replace(LENGTH, version="2"), replace(LENGTH, name="other")])
    report = await check_service(fake, wanted=wanted, timeout_s=5)
    assert {check.scorer for check in report.checks if check.scorer} == checked
    assert [check.fix for check in report.failures] == fixes


async def test_whatever_an_endpoint_raises_is_a_failure() -> None:
    def broken(samples: Sequence[ScoreSample]) -> list[ScoreResult]:
        raise ZeroDivisionError("oops")

    report = await check_service(Fake(behaviour=broken), timeout_s=5)
    assert [(check.name, check.detail) for check in report.failures] == [("one batch", "the call failed (ZeroDivision): oops")]


async def test_an_endpoint_that_ignores_deadlines_is_cut_off() -> None:
    class Deaf(Fake):
        async def describe(self, *, timeout_s: float) -> Sequence[ScorerDescription]:
            await asyncio.Event().wait()
            raise AssertionError

    report = await check_service(Deaf(), timeout_s=0.05)
    assert "no answer although the deadline of 0.05 s has passed" in report.failures[0].detail


async def test_a_late_answer_to_a_short_deadline_is_a_failure() -> None:
    class Late(Fake):
        async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> Scored:
            if timeout_s < 1:
                await asyncio.sleep(1.1)
                raise DeadlineError("late")
            return await Fake.score(self, scorer, version, samples, timeout_s=timeout_s)

    report = await check_service(Late(), timeout_s=5)
    assert [check.name for check in report.failures] == ["short deadline"]


async def test_a_server_that_is_gone_after_a_short_deadline_is_a_failure() -> None:
    class Gone(Fake):
        async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> Scored:
            if self.calls and self.calls[-1][3] < 1:
                raise ConnectionResetError("gone")
            return await Fake.score(self, scorer, version, samples, timeout_s=timeout_s)

    report = await check_service(Gone(), timeout_s=5)
    (failed,) = report.failures
    assert failed.name == "short deadline"
    assert "the call after one that ran out of time got no answer" in failed.detail


async def test_cancellation_ends_the_check() -> None:
    task = asyncio.create_task(check_service(Fake(behaviour=lambda samples: by_length(samples)), timeout_s=5))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


RESULT = ScoreResult(sample_id="a", status=ScoreStatus.SCORED, value=1.0)


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        (RESULT, 0.0),
        (replace(RESULT, message="other words", latency_ms=9.0), 0.0),
        (replace(RESULT, value=1.25), 0.2),
        (replace(RESULT, status=ScoreStatus.ERROR), float("inf")),
        (replace(RESULT, components={"a": 1.0}), float("inf")),
        (replace(RESULT, token_values=(1.0,)), float("inf")),
    ],
)
def test_difference_is_relative_and_infinite_for_another_shape(other: ScoreResult, apart: float) -> None:
    assert difference(RESULT, other) == pytest.approx(apart)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_a_problem_unless_it_is_no_score(value: float) -> None:
    samples = [make_sample(0)]
    result = ScoreResult(sample_id="uid/0/0", status=ScoreStatus.SCORED, value=value)
    assert (problem := result_problem(samples, [result])) is not None
    assert "is scored with value" in problem.what
    assert result_problem(samples, [replace(result, status=ScoreStatus.ERROR)]) is None
