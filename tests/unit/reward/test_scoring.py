"""Running scorers in this process: one result per sample, threads, async, batches, deadlines, preparing."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from shoal_reward.scoring import ScoringPool

from shoal.reward import Row, Scorer
from shoal.types import ScoreResult, ScoreStatus
from tests.helpers.scoring import make_sample, make_samples, make_scorer

LONG_S = 20.0


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    pool = ScoringPool(2)
    yield pool
    pool.shutdown()


def statuses(results: list[ScoreResult]) -> list[str]:
    return [str(result.status) for result in results]


def parse(prompt: str, response: str, row: Row) -> float | None:
    return None if response == "skip" else float(response)


async def parse_async(prompt: str, response: str, row: Row) -> float | None:
    await asyncio.sleep(0)
    return parse(prompt, response, row)


@pytest.mark.parametrize("function", [parse, parse_async])
async def test_pool_one_bad_sample_leaves_the_others_alone(pool: ScoringPool, function: object) -> None:
    scorer = make_scorer(function)  # type: ignore[arg-type]
    results = await pool.score(scorer, make_samples(["1", "word", "nan", "skip", "0.5"]), LONG_S)
    assert statuses(results) == ["scored", "error", "error", "not_scored", "scored"]
    assert [result.sample_id for result in results] == [f"uid/{index}/0" for index in range(5)]
    assert [result.value for result in results] == [1.0, 0.0, 0.0, 0.0, 0.5]
    assert "ValueError" in results[1].message


async def test_pool_no_samples_give_no_results(pool: ScoringPool) -> None:
    assert await pool.score(make_scorer(parse), [], LONG_S) == []


async def test_pool_a_quick_batch_stays_in_one_thread(pool: ScoringPool) -> None:
    threads = set()

    def remember(prompt: str, response: str, row: Row) -> float:
        threads.add(threading.get_ident())
        return 1.0

    results = await pool.score(make_scorer(remember), make_samples(["x"] * 20), LONG_S)
    assert statuses(results) == ["scored"] * 20
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_pool_a_slow_batch_gets_more_threads(pool: ScoringPool) -> None:
    both = threading.Barrier(2)

    def meet(prompt: str, response: str, row: Row) -> float:
        both.wait(timeout=LONG_S)
        return 1.0

    assert statuses(await pool.score(make_scorer(meet), make_samples(["x"] * 4), LONG_S)) == ["scored"] * 4


async def test_pool_sample_past_the_deadline_is_an_error_and_the_rest_is_kept(pool: ScoringPool) -> None:
    release = threading.Event()

    def hang_on_b(prompt: str, response: str, row: Row) -> float:
        if response == "b":
            release.wait(LONG_S)
        return 1.0

    results = await pool.score(make_scorer(hang_on_b), make_samples(["a", "b", "c", "d"]), 0.3)
    assert statuses(results) == ["scored", "error", "scored", "scored"]
    assert results[1].message.startswith("deadline")
    assert results[1].latency_ms >= 300
    assert pool.num_running == 1
    release.set()


async def test_pool_without_a_free_thread_answers_by_the_deadline_and_recovers(pool: ScoringPool) -> None:
    release = threading.Event()

    def hang(prompt: str, response: str, row: Row) -> float:
        release.wait(LONG_S)
        return 1.0

    assert statuses(await pool.score(make_scorer(hang), make_samples(["a", "b"]), 0.1)) == ["error", "error"]
    assert statuses(await pool.score(make_scorer(parse), make_samples(["1"]), 0.1)) == ["error"]
    release.set()
    assert statuses(await pool.score(make_scorer(parse), make_samples(["1"]), LONG_S)) == ["scored"]


async def test_pool_cancels_async_samples_at_the_deadline(pool: ScoringPool) -> None:
    cancelled = []

    async def hang_on_b(prompt: str, response: str, row: Row) -> float:
        if response == "b":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(response)
                raise
        return 1.0

    results = await pool.score(make_scorer(hang_on_b), make_samples(["a", "b", "c"]), 0.2)
    assert statuses(results) == ["scored", "error", "scored"]
    assert results[1].message.startswith("deadline")
    assert cancelled == ["b"]


async def test_pool_bounds_the_async_samples_in_flight(pool: ScoringPool) -> None:
    now, most = 0, 0

    async def count(prompt: str, response: str, row: Row) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return 1.0

    results = await pool.score(make_scorer(count), make_samples(["x"] * 200), LONG_S)
    assert statuses(results) == ["scored"] * 200
    assert 2 <= most <= 64


def batch_parse(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float | None]:
    return [parse(*each) for each in zip(prompts, responses, rows, strict=True)]


async def batch_parse_async(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float | None]:
    return batch_parse(prompts, responses, rows)


@pytest.mark.parametrize("function", [batch_parse, batch_parse_async])
async def test_pool_batch_scorer_gives_each_sample_its_own_status(pool: ScoringPool, function: object) -> None:
    scorer = make_scorer(function, batch=True)  # type: ignore[arg-type]
    assert statuses(await pool.score(scorer, make_samples(["1", "skip", "inf"]), LONG_S)) == ["scored", "not_scored", "error"]
    # The call raises, so its samples are called one by one.
    failed = await pool.score(scorer, make_samples(["1", "word"]), LONG_S)
    assert statuses(failed) == ["scored", "error"]
    assert "ValueError" in failed[1].message


async def test_pool_batch_scorer_of_another_length_is_an_error_of_all(pool: ScoringPool) -> None:
    def too_few(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
        return [1.0]

    results = await pool.score(make_scorer(too_few, batch=True), make_samples(["1", "2"]), LONG_S)
    assert statuses(results) == ["error", "error"]
    assert "1 scores for 2 samples" in results[0].message


async def test_pool_scorer_that_exits_or_sets_an_alarm_is_an_error_not_a_zero(pool: ScoringPool) -> None:
    def leave(prompt: str, response: str, row: Row) -> float:
        raise SystemExit(1)

    def alarm(prompt: str, response: str, row: Row) -> float:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        return 1.0

    assert statuses(await pool.score(make_scorer(leave), make_samples(["1"]), LONG_S)) == ["error"]
    results = await pool.score(make_scorer(alarm), make_samples(["1"]), LONG_S)
    assert results[0].status is ScoreStatus.ERROR
    assert "main thread" in results[0].message


def preparing_scorer(prepare: Callable[[], None]) -> Scorer:
    return dataclasses.replace(make_scorer(parse), prepare=prepare)


async def test_pool_prepares_a_scorer_once_before_its_first_sample(pool: ScoringPool) -> None:
    prepared: list[str] = []
    scorer = preparing_scorer(lambda: prepared.append("once"))
    for batch in await asyncio.gather(*(pool.score(scorer, make_samples(["1"]), LONG_S) for _ in range(3))):
        assert statuses(batch) == ["scored"]
    assert prepared == ["once"]


async def test_pool_scorer_that_cannot_prepare_is_an_error_of_its_samples(pool: ScoringPool) -> None:
    def fail() -> None:
        raise OSError("no such model")

    results = await pool.score(preparing_scorer(fail), make_samples(["1", "2"]), LONG_S)
    assert [result.message for result in results] == ["scorer 'under_test' could not prepare: OSError: no such model"] * 2


async def test_pool_samples_wait_for_slow_preparing_until_their_deadline(pool: ScoringPool) -> None:
    release = threading.Event()

    def wait() -> None:
        release.wait(LONG_S)

    scorer = preparing_scorer(wait)
    (result,) = await pool.score(scorer, make_samples(["1"]), 0.1)
    assert result.message.startswith("deadline: scorer 'under_test' was still preparing")
    release.set()
    assert statuses(await pool.score(scorer, make_samples(["1"]), LONG_S)) == ["scored"]


async def test_pool_gives_token_ids_to_a_scorer_that_needs_them(pool: ScoringPool) -> None:
    def ids(prompt: str, response: str, row: Row) -> dict[str, float]:
        return {"prompt": float(sum(row["prompt_ids"])), "response": float(sum(row["response_ids"]))}  # type: ignore[call-overload]

    scorer = dataclasses.replace(make_scorer(ids), needs_token_ids=True)
    with_ids = dataclasses.replace(make_sample(0), prompt_ids=(1, 2), response_ids=(3, 4, 5))
    given, without = await pool.score(scorer, [with_ids, make_sample(1)], LONG_S)
    assert given.components == {"prompt": 3.0, "response": 12.0}
    assert "came with 0 of its 3 response_ids" in without.message
