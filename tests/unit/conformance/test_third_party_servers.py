"""Conformance over real gRPC: a right server of a third party passes, and every kind of fault is found and named."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.conformance import CheckLevel, ConformanceReport, check_service
from shoal.rpc.v1 import common_pb2, reward_pb2, reward_pb2_grpc
from tests.helpers.third_party_reward import MAX_BYTES, Context, ThirdPartyReward, served

Request = reward_pb2.ScoreRequest
Sample = reward_pb2.ScoreSample
Result = reward_pb2.ScoreResult

SCORED = common_pb2.SCORE_STATUS_SCORED


async def checked(
    servicer: reward_pb2_grpc.RewardServiceServicer, *, timeout_s: float = 10.0, max_bytes: int = MAX_BYTES, tolerant: bool = False
) -> ConformanceReport:
    async with served(servicer, max_bytes=max_bytes) as address, RewardClient(address, SecuritySection(), tolerant=tolerant) as client:
        return await check_service(client, wanted=[("equals", "2")], timeout_s=timeout_s)


def found(report: ConformanceReport, level: CheckLevel) -> dict[str, str]:
    return {check.name: f"{check.detail} -> {check.fix}" for check in report.checks if check.level is level}


async def test_a_right_server_of_a_third_party_passes_without_a_warning() -> None:
    report = await checked(ThirdPartyReward())
    assert [check for check in report.checks if check.level is not CheckLevel.OK] == []
    assert report.passed
    assert [(scorer.name, scorer.version) for scorer in report.scorers] == [("equals", "1"), ("equals", "2")]
    assert {check.scorer for check in report.checks} == {"", "equals@2"}
    assert len(report.checks) == 19


class _NoScore(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not yet")
        raise AssertionError


class _AcceptsAnything(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        results = [self.result(sample, index, request) for index, sample in enumerate(request.samples)]
        return reward_pb2.ScoreResponse(scorer=request.scorer, version=request.version or "2", results=results)


class _AnotherVersion(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        answer = await super().Score(request, context)
        answer.version = "1"
        return answer


class _NoVersion(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        answer = await super().Score(request, context)
        if not request.version:
            answer.version = ""
        return answer


class _RefusesEmptyBatches(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        if not request.samples:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing to score")
        return await super().Score(request, context)


class _DropsOne(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        answer = await super().Score(request, context)
        if len(answer.results) > 1:
            del answer.results[-1]
        return answer


class _OtherOrder(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        answer = await super().Score(request, context)
        ordered = sorted(answer.results, key=lambda result: result.sample_id, reverse=True)
        return reward_pb2.ScoreResponse(scorer=answer.scorer, version=answer.version, results=ordered)


class _Nameless(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        result = super().result(sample, index, request)
        result.sample_id = ""
        return result


class _NoStatus(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, value=1.0)


class _NotFinite(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=float("nan"))


class _PartsDoNotAddUp(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=1.0, components={"style": 0.25, "answer": 0.5})


class _TooFewTokens(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=0.5, token_values=[0.5])


class _FailsTheCallForOneRow(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        if '"answer": "' not in sample.row_json:
            raise KeyError("answer")
        return super().result(sample, index, request)


class _OneBadRowSpoilsTheOthers(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        result = super().result(sample, index, request)
        if any('"answer"' not in other.row_json for other in request.samples):
            result.status = common_pb2.SCORE_STATUS_ERROR
        return result


class _DependsOnTheBatch(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=float(len(request.samples)))


class _DependsOnThePlace(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=float(index > len(request.samples) / 2))


class _SharesState(ThirdPartyReward):
    num_open = 0

    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        self.num_open += 1
        await asyncio.sleep(0.01)
        answer = await super().Score(request, context)
        self.num_open -= 1
        return answer

    def result(self, sample: Sample, index: int, request: Request) -> Result:
        return Result(sample_id=sample.sample_id, status=SCORED, value=float(self.num_open))


class _NoNullBytes(ThirdPartyReward):
    def result(self, sample: Sample, index: int, request: Request) -> Result:
        if "\0" in sample.response:
            raise ValueError("embedded null byte")
        return super().result(sample, index, request)


class _NoLargeSamples(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        if any(len(sample.response) > 100_000 for sample in request.samples):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too long")
        return await super().Score(request, context)


class _FailsAtTheDeadline(ThirdPartyReward):
    async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
        left_s = context.time_remaining()
        if left_s is not None and left_s < 1:
            await context.abort(grpc.StatusCode.INTERNAL, "timer went off")
        return await super().Score(request, context)


FAULTS: list[tuple[type[ThirdPartyReward], str, str]] = [
    (_NoScore, "one batch", "the service does not offer this call"),
    (_AcceptsAnything, "unknown scorer", "no-such-scorer is answered with results -> answer a scorer or version that you do not have"),
    (_AcceptsAnything, "unknown version", "equals@0.no-such-version is answered with results"),
    (_AnotherVersion, "one batch", "version '2' was asked for, the answer says '1'"),
    (_NoVersion, "version left out", "the answer names version '', offered are 1, 2"),
    (_RefusesEmptyBatches, "empty batch", "nothing to score -> answer an empty batch with the scorer, its version and no results"),
    (_DropsOne, "one batch", "answered 6 results for 7 samples"),
    (_OtherOrder, "one batch", "in another order"),
    (_Nameless, "one batch", "one result per sample, in order"),
    (_NoStatus, "one batch", "score status 0 is unknown"),
    (_NotFinite, "one batch", "is not finite"),
    (_PartsDoNotAddUp, "one batch", "has value 1, its components add up to 0.75 -> make value the sum of the components"),
    (_TooFewTokens, "one batch", "has 1 token_values for 8 response tokens"),
    (_FailsTheCallForOneRow, "rows it cannot score", "never fail the call for one sample"),
    (_OneBadRowSpoilsTheOthers, "rows it cannot score", "a good sample beside them changed: sample check-0/0/0: 1 and error"),
    (_DependsOnTheBatch, "batch equals single", "other scores (sample check-0/0/0: 7 and 1)"),
    (_DependsOnTheBatch, "large batch", "7 and 512"),
    (_DependsOnThePlace, "other order", "let no sample's score depend on its place in the batch"),
    (_SharesState, "calls at once", "let calls share no state"),
    (_NoNullBytes, "odd text", "embedded null byte"),
    (_NoLargeSamples, "large sample", "too long"),
    (_FailsAtTheDeadline, "short deadline", "a call with 50 ms to go ended with Internal"),
]


@pytest.mark.parametrize(("servicer", "check", "words"), FAULTS, ids=[f"{kind.__name__}-{check}" for kind, check, _ in FAULTS])
async def test_a_fault_is_a_failure_that_says_what_and_how_to_repair_it(servicer: type[ThirdPartyReward], check: str, words: str) -> None:
    report = await checked(servicer())
    failures = found(report, CheckLevel.FAILURE)
    assert not report.passed
    assert words in failures[check]
    assert all(made.fix for made in report.failures)


@pytest.mark.parametrize(
    ("servicer", "words"),
    [
        (_NoStatus, "the server broke the rules: score status 0 is unknown"),
        (_NotFinite, "the server broke the rules: score of sample check-0/0/0 is not finite"),
        (_OtherOrder, "result 0 has sample_id 'check-6/0/0', the sample 'check-0/0/0'"),
        (_DropsOne, "6 results for 7 samples"),
    ],
)
async def test_what_the_client_of_a_run_lets_pass_is_a_failure_too(servicer: type[ThirdPartyReward], words: str) -> None:
    report = await checked(servicer(), tolerant=True)
    assert words in found(report, CheckLevel.FAILURE)["one batch"]


@pytest.mark.parametrize(
    ("name", "versions", "words"),
    [
        ("equals", ("2", "2"), "equals@2 is described twice"),
        ("Equals It", ("2",), "name 'Equals It' is invalid"),
        ("equals", ("2", "v 1"), "version 'v 1' of scorer 'equals' is invalid"),
    ],
)
async def test_names_and_versions_must_be_valid_and_unique(name: str, versions: tuple[str, ...], words: str) -> None:
    servicer = ThirdPartyReward()
    servicer.name, servicer.versions = name, versions
    assert words in found(await checked(servicer), CheckLevel.FAILURE)["names and versions"]


async def test_a_server_without_scorers_fails() -> None:
    servicer = ThirdPartyReward()
    servicer.versions = ()
    report = await checked(servicer)
    assert "names no scorer" in found(report, CheckLevel.FAILURE)["describes itself"]
    assert "scorer 'equals' version '2' is not offered" in found(report, CheckLevel.FAILURE)["offers the scorer"]


async def test_a_missing_fingerprint_is_a_warning() -> None:
    servicer = ThirdPartyReward()
    servicer.fingerprint = ""
    report = await checked(servicer)
    assert report.passed
    assert "none for equals@1, equals@2" in found(report, CheckLevel.WARNING)["fingerprints"]


async def test_another_service_at_the_address_is_a_failure() -> None:
    async with served(None) as address, RewardClient(address, SecuritySection()) as client:
        report = await check_service(client, timeout_s=5)
    (check,) = report.checks
    assert (check.level, check.name) == (CheckLevel.FAILURE, "describes itself")
    assert "implement DescribeReward and Score" in check.fix


async def test_nobody_at_the_address_is_a_failure() -> None:
    async with RewardClient("127.0.0.1:1", SecuritySection()) as client:
        report = await check_service(client, timeout_s=0.3)
    assert [check.name for check in report.failures] == ["describes itself"]


async def test_a_message_limit_below_64_mib_is_a_failure() -> None:
    report = await checked(ThirdPartyReward(), max_bytes=1 << 18)
    assert "64 MiB" in found(report, CheckLevel.FAILURE)["large sample"]


async def test_a_scorer_that_draws_is_a_warning_and_nothing_is_compared_with_its_scores() -> None:
    class Draws(ThirdPartyReward):
        def result(self, sample: Sample, index: int, request: Request) -> Result:
            return Result(sample_id=sample.sample_id, status=SCORED, value=random.random())

    report = await checked(Draws())
    assert report.passed
    warnings = found(report, CheckLevel.WARNING)
    assert "the same batch got other scores" in warnings["same twice"]
    assert {"batch equals single", "split batch", "other order", "calls at once", "large batch"} < warnings.keys()


async def test_rounding_of_a_batch_is_a_warning() -> None:
    class Rounds(ThirdPartyReward):
        def result(self, sample: Sample, index: int, request: Request) -> Result:
            return Result(sample_id=sample.sample_id, status=SCORED, value=0.5 + 1e-6 * (len(request.samples) == 1))

    report = await checked(Rounds())
    assert report.passed
    assert "fine for a model" in found(report, CheckLevel.WARNING)["batch equals single"]


async def test_a_server_that_scores_nothing_is_a_warning_that_names_data() -> None:
    class Nothing(ThirdPartyReward):
        def result(self, sample: Sample, index: int, request: Request) -> Result:
            return Result(sample_id=sample.sample_id, status=common_pb2.SCORE_STATUS_ERROR, message="no column `solution`")

    report = await checked(Nothing())
    assert report.passed
    text = found(report, CheckLevel.WARNING)["a sample is scored"]
    assert "7 error, such as: no column `solution`" in text
    assert "--data" in text


async def test_a_server_that_hangs_is_given_up_after_two_calls() -> None:
    class Hangs(ThirdPartyReward):
        num_calls = 0

        async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
            self.num_calls += 1
            if request.scorer == self.name and self.num_calls > 3:
                await asyncio.Event().wait()
            return await super().Score(request, context)

    started = time.monotonic()
    report = await checked(Hangs(), timeout_s=0.4)
    assert time.monotonic() - started < 10
    assert set(found(report, CheckLevel.FAILURE)) == {"same twice", "version left out"}
    assert "10 checks were left out" in found(report, CheckLevel.WARNING)["the rest"]


async def test_a_slow_scorer_gets_a_batch_that_it_can_do_and_a_warning() -> None:
    class Slow(ThirdPartyReward):
        async def Score(self, request: Request, context: Context) -> reward_pb2.ScoreResponse:
            if request.scorer == self.name:
                await asyncio.sleep(0.005 * len(request.samples))
            return await super().Score(request, context)

    report = await checked(Slow(), timeout_s=1.5)
    assert report.passed
    assert "512 samples would not be done in time" in found(report, CheckLevel.WARNING)["large batch"]
