"""Calls of reward servers: replicas, retries, limits, failures; with fakes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from shoal_coordinator.rewards.breaker import MAX_FAILURES
from shoal_coordinator.rewards.call_sizes import GROUPS_PER_CALL, MAX_CALL_BYTES, MAX_SAMPLE_BYTES
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.slow_samples import SlowSamples
from shoal_coordinator.server_pool import ServerPool

from shoal.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ShoalError,
    StateError,
    UnavailableError,
)
from shoal.telemetry.metrics import sample_value
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import FakeReward, offered, reward_pool, scored_one
from tests.helpers.routes import component
from tests.helpers.scoring import make_sample

RETRIED = [UnavailableError("down"), InternalError("500"), CapacityError("busy")]
NOT_RETRIED = [InvalidRequestError("422"), NotFoundError("gone"), StateError("not now")]


def calls_on(pool: ServerPool[RewardEndpoint], *, limit: int = 64, slow: SlowSamples | None = None) -> ScorerCalls:
    """Calls that retry at once."""
    return ScorerCalls(pool, max_open_requests=limit, slow=slow, random_unit=lambda: 0.0)


def group(number: int, num_samples: int = 2, **settings: object) -> list[ScoreSample]:
    return [replace(make_sample(index, **settings), sample_id=f"g{number}/{index}/0") for index in range(num_samples)]  # type: ignore[arg-type]


def statuses(results: Sequence[ScoreResult]) -> list[ScoreStatus]:
    return [result.status for result in results]


@pytest.mark.parametrize("error", RETRIED)
async def test_score_is_right_after_two_failures_of_a_lone_server(error: ShoalError) -> None:
    """R46: 500, 500, 200."""
    server = FakeReward(failures=[error, error])
    service, results = await calls_on(reward_pool(a=server)).score(component(), group(0), 1)
    assert (service, [result.value for result in results], len(server.calls)) == ("a", [1.0, 1.0], 3)


async def test_server_that_always_fails_leaves_samples_unscored_and_is_not_stormed() -> None:
    """R46: always 500."""
    server = FakeReward(failures=[InternalError("500")] * 1000)
    calls = calls_on(reward_pool(a=server))
    answers = await asyncio.gather(*(calls.score(component(timeout_s=0.3), group(number), 1) for number in range(20)))
    for service, results in answers:
        assert (service, statuses(results), {result.value for result in results}) == ("a", [ScoreStatus.ERROR] * 2, {0.0})
        assert results[0].message == "sum@3 failed on 'a': InternalError: 500"
    assert len(server.calls) <= 20 + MAX_FAILURES


@pytest.mark.parametrize("error", NOT_RETRIED)
async def test_refusal_is_not_asked_again(error: ShoalError) -> None:
    """R46: 422."""
    server = FakeReward(failures=[error])
    _, results = await calls_on(reward_pool(a=server)).score(component(), group(0), 1)
    assert (len(server.calls), statuses(results)) == (1, [ScoreStatus.ERROR] * 2)
    assert results[0].message == f"sum@3 failed on 'a': {type(error).__name__}: {error}"


async def test_no_more_requests_than_the_limit_are_open_for_2000_groups_at_once() -> None:
    """R46: 2000 at once, limit 64; all are scored in the end."""
    num_open = max_open = 0

    class Counting(FakeReward):
        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            nonlocal num_open, max_open
            num_open += 1
            max_open = max(max_open, num_open)
            await asyncio.sleep(0)
            num_open -= 1
            return await super().score(scorer, version, samples, timeout_s=timeout_s)

    calls = calls_on(reward_pool(a=Counting(), b=Counting()), limit=64)
    answers = await asyncio.gather(*(calls.score(component(), group(number, 1), 1) for number in range(2000)))
    assert max_open == 64
    assert {results[0].status for _, results in answers} == {ScoreStatus.SCORED}
    assert [results[0].sample_id for _, results in answers] == [f"g{number}/0/0" for number in range(2000)]


async def test_waiting_for_a_turn_is_no_part_of_the_deadline() -> None:
    gate = asyncio.Event()
    pool = reward_pool(a=FakeReward(gate=gate))
    calls = calls_on(pool, limit=1)
    scoring = [asyncio.create_task(calls.score(component(timeout_s=0.2), group(number), 1)) for number in range(3)]
    await asyncio.sleep(0.4)
    gate.set()
    assert {status for task in scoring for status in statuses((await task)[1])} == {ScoreStatus.SCORED}


async def test_work_goes_to_the_replica_with_the_least_of_it() -> None:
    gate = asyncio.Event()
    servers = {name: FakeReward(gate=gate) for name in "abc"}
    calls = calls_on(reward_pool(**servers))
    scoring = [asyncio.create_task(calls.score(component(), group(number), 1)) for number in range(9)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert {name: server.num_open for name, server in servers.items()} == {"a": 3, "b": 3, "c": 3}
    gate.set()
    await asyncio.gather(*scoring)


@pytest.mark.parametrize("error", RETRIED)
async def test_failing_replica_is_left_for_another_one(error: ShoalError) -> None:
    bad, good = FakeReward(failures=[error]), FakeReward()
    service, results = await calls_on(reward_pool(a=bad, b=good)).score(component(), group(0), 1)
    assert (service, len(bad.calls), len(good.calls), statuses(results)) == ("b", 1, 1, [ScoreStatus.SCORED] * 2)


async def test_server_with_other_code_under_the_same_version_gets_no_work() -> None:
    same, other = FakeReward(scorers=offered("sum", fingerprint="f1")), FakeReward(scorers=offered("sum", fingerprint="f2"))
    older = FakeReward(scorers=offered("sum", version="2", fingerprint="f1"))
    calls = calls_on(reward_pool(a=other, b=older, z=same))
    answers = await asyncio.gather(*(calls.score(component(fingerprint="f1"), group(number), 1) for number in range(20)))
    assert {service for service, _ in answers} == {"z"}
    assert (other.calls, older.calls) == ([], [])


async def test_scorer_that_nobody_offers_is_an_error_that_says_what_there_is() -> None:
    calls = calls_on(reward_pool(a=FakeReward(scorers=offered("exact", fingerprint="f1"))))
    service, results = await calls.score(component(timeout_s=0.05), group(0), 1)
    assert (service, statuses(results)) == ("", [ScoreStatus.ERROR] * 2)
    assert results[0].message == (
        "sum@3 failed: UnavailableError: no reward server offered sum@3, fingerprint none for 0.05 s; there is: a (exact@3 f1): "
        "start one that does"
    )


async def test_server_that_learns_a_scorer_later_is_used() -> None:
    server = FakeReward(scorers=[])
    scoring = asyncio.create_task(calls_on(reward_pool(a=server)).score(component(), group(0), 1))
    await asyncio.sleep(0)
    server.scorers = offered("sum")
    assert statuses((await scoring)[1]) == [ScoreStatus.SCORED] * 2


async def test_one_replica_grows_to_three_and_shrinks_to_one_without_losing_a_sample() -> None:
    gates = {name: asyncio.Event() for name in "abc"}
    servers = {name: FakeReward(gate=gates[name]) for name in "abc"}
    pool = reward_pool(a=servers["a"])
    calls = calls_on(pool)
    scoring = [asyncio.create_task(calls.score(component(), group(number), 1)) for number in range(4)]
    await until(lambda: servers["a"].num_open == 4)
    pool.add("b", servers["b"])
    pool.add("c", servers["c"])
    scoring += [asyncio.create_task(calls.score(component(), group(number), 1)) for number in range(4, 10)]
    await until(lambda: servers["b"].num_open + servers["c"].num_open == 6)
    # In the midst of their calls.
    pool.remove("a")
    pool.remove("c")
    gates["b"].set()
    answers = await asyncio.gather(*scoring)
    assert {service for service, _ in answers} == {"b"}
    assert [result.sample_id for _, results in answers for result in results] == [f"g{n}/{i}/0" for n in range(10) for i in (0, 1)]
    assert {result.status for _, results in answers for result in results} == {ScoreStatus.SCORED}


async def test_failing_replica_rests_while_the_other_does_the_work_and_is_tried_again() -> None:
    now_s = 0.0
    bad, good = FakeReward(failures=[InternalError("500")] * MAX_FAILURES), FakeReward()
    calls = ScorerCalls(reward_pool(a=bad, b=good), max_open_requests=8, now_s=lambda: now_s, random_unit=lambda: 0.0)
    for number in range(20):
        assert (await calls.score(component(), group(number), 1))[0] == "b"
    assert len(bad.calls) == MAX_FAILURES
    now_s = 1.0
    assert (await calls.score(component(), group(20), 1))[0] == "a"


async def test_replica_that_refuses_at_once_does_not_draw_all_the_work() -> None:
    bad = FakeReward(failures=[NotFoundError("started again without it")] * 1000)
    calls = calls_on(reward_pool(a=bad, b=FakeReward()))
    answers = [await calls.score(component(), group(number), 1) for number in range(50)]
    assert len(bad.calls) == MAX_FAILURES
    assert sum(results[0].status is ScoreStatus.SCORED for _, results in answers) == 50 - MAX_FAILURES


async def test_late_answer_is_an_error_and_not_asked_again() -> None:
    servers = {name: FakeReward(failures=[DeadlineError("late")]) for name in "ab"}
    _, results = await calls_on(reward_pool(**servers)).score(component(), group(0), 1)
    assert statuses(results) == [ScoreStatus.ERROR] * 2
    assert sum(len(server.calls) for server in servers.values()) == 1


async def test_deadline_grows_with_the_number_of_groups() -> None:
    server = FakeReward()
    calls = calls_on(reward_pool(a=server))
    await calls.score_groups(component(timeout_s=2.0), [group(number) for number in range(3)])
    assert server.timeouts_s == [pytest.approx(6.0, abs=0.5)]


async def test_answer_of_another_version_is_not_taken() -> None:
    class Other(FakeReward):
        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            return "4", (await super().score(scorer, version, samples, timeout_s=timeout_s))[1]

    service, results = await calls_on(reward_pool(a=Other(), b=FakeReward())).score(component(), group(0), 1)
    assert (service, statuses(results)) == ("b", [ScoreStatus.SCORED] * 2)
    _, results = await calls_on(reward_pool(a=Other())).score(component(timeout_s=0.05), group(0), 1)
    assert results[0].message == "sum@3 failed on 'a': InternalError: it answered as version '4', not '3'"


async def test_garbage_costs_the_samples_that_it_is_about() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        value = float("nan") if sample.sample_id.startswith("g0/0") else 1.0
        renamed = "else/0/0" if sample.sample_id.startswith("g0/1") else sample.sample_id
        return ScoreResult(sample_id=renamed, status=ScoreStatus.SCORED, value=value)

    _, results = await calls_on(reward_pool(a=FakeReward(score_one))).score(component(), group(0, 3), 1)
    assert statuses(results) == [ScoreStatus.ERROR, ScoreStatus.ERROR, ScoreStatus.SCORED]
    assert [result.sample_id for result in results] == ["g0/0/0", "g0/1/0", "g0/2/0"]


async def test_garbage_that_cannot_be_told_apart_is_left_for_another_replica() -> None:
    garbage = FakeReward(lambda sample: replace(scored_one(sample), sample_id=""))
    service, results = await calls_on(reward_pool(a=garbage, b=FakeReward())).score(component(), group(0), 1)
    assert (service, statuses(results)) == ("b", [ScoreStatus.SCORED] * 2)


async def test_scorers_that_need_token_ids_get_them_and_the_others_do_not() -> None:
    samples = [replace(sample, prompt_ids=(1, 2), response_ids=(3, 4, 5)) for sample in group(0)]
    for needs, expected in ((True, ((1, 2), (3, 4, 5))), (False, ((), ()))):
        server = FakeReward(scorers=offered("sum", needs_token_ids=needs))
        await calls_on(reward_pool(a=server)).score(component(), samples, 1)
        assert {(sample.prompt_ids, sample.response_ids) for call in server.calls for sample in call} == {expected}


async def test_groups_share_calls_up_to_a_number() -> None:
    server = FakeReward()
    answers = await calls_on(reward_pool(a=server)).score_groups(component(), [group(n) for n in range(2 * GROUPS_PER_CALL + 1)])
    assert sorted(map(len, server.calls)) == [2, 2 * GROUPS_PER_CALL, 2 * GROUPS_PER_CALL]
    assert [[result.sample_id for _, result in own] for own in answers] == [
        [f"g{n}/{i}/0" for i in (0, 1)] for n in range(2 * GROUPS_PER_CALL + 1)
    ]


async def test_groups_share_calls_up_to_a_size_and_a_large_sample_has_its_own() -> None:
    server = FakeReward()
    huge = "x" * (10 << 20)
    groups = [group(0, 2), group(1, 1, response=huge), group(2, 3), [*group(3, 1), *group(4, 1, response=huge), *group(5, 1)]]
    answers = await calls_on(reward_pool(a=server)).score_groups(component(), groups)
    assert [len(own) for own in answers] == [2, 1, 3, 3]
    assert {result.status for own in answers for _, result in own} == {ScoreStatus.SCORED}
    sizes = [sum(len(sample.response) for sample in call) for call in server.calls]
    assert [size for size in sizes if size > MAX_CALL_BYTES] == [len(huge)] * 2
    assert [len(call) for call in server.calls if sum(len(sample.response) for sample in call) > MAX_CALL_BYTES] == [1, 1]


async def test_sample_that_fits_into_no_message_is_an_error_of_its_own() -> None:
    server = FakeReward()
    samples = [*group(0, 1), *group(1, 1, response="ä" * (MAX_SAMPLE_BYTES // 2 + 1)), *group(2, 1)]
    _, results = await calls_on(reward_pool(a=server)).score(component(), samples, 1)
    assert statuses(results) == [ScoreStatus.SCORED, ScoreStatus.ERROR, ScoreStatus.SCORED]
    assert "more than fits into a message" in results[1].message


async def test_cancelled_call_ends_at_once_and_lets_the_next_one_in() -> None:
    gate = asyncio.Event()
    server = FakeReward(gate=gate)
    calls = calls_on(reward_pool(a=server), limit=1)
    first = asyncio.create_task(calls.score(component(), group(0), 1))
    await until(lambda: server.num_open == 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()
    assert statuses((await calls.score(component(), group(1), 1))[1]) == [ScoreStatus.SCORED] * 2


async def test_slow_samples_and_statuses_are_counted() -> None:
    slow = SlowSamples()

    def score_one(sample: ScoreSample) -> ScoreResult:
        is_slow = sample.sample_id == "g0/149/0"
        status = ScoreStatus.NOT_SCORED if is_slow else ScoreStatus.SCORED
        return ScoreResult(sample_id=sample.sample_id, status=status, latency_ms=99.0 if is_slow else 1.0)

    server = FakeReward(score_one, scorers=offered("counted"))
    await calls_on(reward_pool(a=server), slow=slow).score(component("counted"), group(0, 150), 1)
    assert [(sample.sample_id, sample.service, sample.latency_ms) for sample in slow.samples()] == [("g0/149/0", "a", 99.0)]
    labels = {"scorer": "counted", "version": "3"}
    counts = {
        status: sample_value("shoal_coordinator_scored_samples_total", {**labels, "status": status}) for status in ("scored", "not_scored")
    }
    assert counts == {"scored": 149.0, "not_scored": 1.0}
    assert sample_value("shoal_coordinator_score_call_seconds_count", labels) == 1.0


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition that no event announces."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0)
