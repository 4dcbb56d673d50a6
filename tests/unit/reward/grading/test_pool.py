"""A real pool of graders: results, batches, preparing, deadlines, bounds, poisoned input, start."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shoal_reward.grading import crew
from shoal_reward.grading.pool import GraderPool
from shoal_reward.loading import load_modules
from shoal_reward.room import Room

from shoal.codec.reward import score_sample_to_proto
from shoal.config.reward_service import RewardServiceSettings
from shoal.errors import CapacityError, ConfigError
from shoal.reward import REGISTRY, Scorer
from shoal.rpc.v1 import reward_pb2
from shoal.rpc.v1.common_pb2 import FINISH_REASON_STOP, SCORE_STATUS_ERROR, SCORE_STATUS_SCORED
from shoal.telemetry.metrics import sample_value
from tests.helpers.grading import LONG_S, do, grader_scorer, messages, running_pool
from tests.helpers.scoring import make_sample


@pytest.fixture
async def pool() -> AsyncIterator[GraderPool]:
    async with running_pool(sample_timeout_s=1.0) as pool:
        yield pool


async def test_results_are_in_order_and_keep_statuses_apart(pool: GraderPool) -> None:
    results = await do(pool, ["one", "skip", "nan", "raise word", "", "three"])
    assert [str(result.status) for result in results] == ["scored", "not_scored", "error", "error", "scored", "scored"]
    assert [result.value for result in results] == [3.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    assert [result.sample_id for result in results] == [f"uid/{index}/0" for index in range(6)]
    assert await do(pool, []) == []


async def test_many_callers_get_their_own_results() -> None:
    async with running_pool(workers=2) as pool:
        answers = await asyncio.gather(*(do(pool, ["x" * (start + index) for index in range(200)]) for start in range(8)))
    assert [[result.value for result in answer] for answer in answers] == [
        [float(start + index) for index in range(200)] for start in range(8)
    ]


async def test_slow_samples_are_spread_over_graders() -> None:
    async with running_pool(workers=2) as pool:
        await do(pool, ["quick"] * 200)
        while len({result.value for result in await do(pool, ["pid"] * 200)}) < 2:
            pass
        # The first sample is slow, and those behind it are expected to be quick: they must not wait for it.
        slow = asyncio.create_task(do(pool, ["sleep 60", *["four"] * 20], budget_s=4.0))
        await asyncio.sleep(0.2)
        assert {result.value for result in await do(pool, ["five5"] * 20)} == {5.0}
        assert not slow.done()
        first, *others = await slow
    assert first.message.startswith("deadline")
    assert [result.value for result in others] == [4.0] * 20


async def test_batch_scorer_gets_a_share_of_the_batch_in_one_call(pool: GraderPool) -> None:
    results = await do(pool, ["x"] * 100, scorer="deeds_together")
    assert [result.value for result in results] == [64.0] * 64 + [36.0] * 36


@pytest.mark.parametrize(("deed", "message"), [("raise word", "ValueError"), ("exit 3", "exited with code 3"), ("endless", "time limit")])
async def test_batch_scorer_with_one_bad_sample_is_called_sample_by_sample(pool: GraderPool, deed: str, message: str) -> None:
    results = await do(pool, ["a", "b", deed, "d"], scorer="deeds_together")
    assert [str(result.status) for result in results] == ["scored", "scored", "error", "scored"]
    assert [result.value for result in results] == [1.0, 1.0, 0.0, 1.0]
    assert message in results[2].message


async def test_batch_scorer_that_returns_another_number_is_an_error_of_all(pool: GraderPool) -> None:
    results = await do(pool, ["a", "b"], scorer="short_list")
    assert [result.message for result in results] == [
        "ValueError: the batch scorer returned 1 scores for 2 samples: return one per sample"
    ] * 2


async def test_prepare_may_take_longer_than_a_sample_and_runs_once() -> None:
    async with running_pool(sample_timeout_s=0.2, prepare_timeout_s=LONG_S) as pool:
        results = await do(pool, ["a", "b", "c"], scorer="prepared")
    assert [(str(result.status), result.value) for result in results] == [("scored", 1.0)] * 3


async def test_prepare_that_fails_is_an_error_that_says_so(pool: GraderPool) -> None:
    results = await do(pool, ["a", "b"], scorer="unprepared")
    assert [result.message for result in results] == ["scorer 'unprepared' could not prepare: RuntimeError: no weights in sight"] * 2
    assert [result.value for result in await do(pool, ["four"])] == [4.0]


async def test_prepare_that_never_ends_is_killed() -> None:
    # The limit holds for loading modules too, which a busy machine does not do at once.
    async with running_pool(prepare_timeout_s=5.0) as pool:
        (result,) = await do(pool, ["a"], scorer="never_prepared")
        assert "killed at the time limit of 5 s (prepare_timeout_s) for preparing" in result.message


def killed_at_the_limit() -> float:
    return sample_value("shoal_reward_killed_workers_total", {"cause": "time_limit"}) or 0.0


async def test_deadline_before_the_limit_ends_the_wait_and_frees_the_queue() -> None:
    before = killed_at_the_limit()
    async with running_pool(sample_timeout_s=2.0) as pool:
        await do(pool, ["warm"] * 5)
        late = await do(pool, ["four", "sleep 60", "fifth", "sleep 60", "sleep 60"], budget_s=1.0)
        assert str(late[0].status) == "scored"
        assert [result.message.split(":")[0] for result in late[1:]] == ["deadline"] * 4
        # Only the sample that runs is waited for: its caller's others are dropped.
        assert [result.value for result in await do(pool, ["sixth"])] == [5.0]
    assert killed_at_the_limit() - before == 1


async def test_cancelled_caller_leaves_nothing_in_the_queue() -> None:
    before = killed_at_the_limit()
    async with running_pool(sample_timeout_s=1.0) as pool:
        scoring = asyncio.create_task(do(pool, ["sleep 60"] * 20))
        await asyncio.sleep(0.1)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert [result.value for result in await do(pool, ["sixth"])] == [5.0]
    assert killed_at_the_limit() - before == 1


async def test_full_pool_refuses_more(monkeypatch: pytest.MonkeyPatch, pool: GraderPool) -> None:
    monkeypatch.setattr(pool, "_room", Room(max_samples=10))
    with pytest.raises(CapacityError, match="limit of 10 samples"):
        await do(pool, ["x"] * 11)
    assert len(await do(pool, ["x"] * 10)) == 10
    assert len(await do(pool, ["x"] * 10)) == 10


async def test_token_ids_reach_a_scorer_that_needs_them(pool: GraderPool) -> None:
    with_ids = dataclasses.replace(make_sample(0), prompt_ids=(10, 20), response_ids=(1, 2, 3))
    samples = [score_sample_to_proto(sample) for sample in (with_ids, make_sample(1))]
    given, without = await pool.score(grader_scorer("ids"), samples, LONG_S)
    assert list(given.token_values) == [31.0, 32.0, 33.0]
    assert "needs token ids" in without.message


async def test_poisoned_input_breaks_nothing_but_itself(pool: GraderPool) -> None:
    def poison(index: int, response: str = "x", row_json: str = "{}") -> reward_pb2.ScoreSample:
        return reward_pb2.ScoreSample(sample_id=str(index), response=response, row_json=row_json, finish_reason=FINISH_REASON_STOP)

    depth = 100_000
    samples = [
        poison(0, response="x" * 10_000_000),
        poison(1, response="\0" * 7),
        poison(2, row_json='{"a": "\\ud800"}'),
        poison(3, row_json='{"a":' * depth + "1" + "}" * depth),
        poison(4, row_json="[" * depth),
        poison(5, row_json="not JSON"),
        poison(6, response="\U0010ffff\ufffe\u202e" * 3),
        reward_pb2.ScoreSample(sample_id="7", response="no finish reason"),
        poison(8, response="{" * depth),
    ]
    results = await pool.score(grader_scorer("row"), samples, LONG_S)
    bad = {3, 4, 5, 7}
    assert [result.status for result in results] == [SCORE_STATUS_ERROR if index in bad else SCORE_STATUS_SCORED for index in range(9)]
    assert results[0].components["response"] == 1e7
    assert results[1].components["nulls"] == 7.0
    assert results[2].components["row"] == 1.0


async def test_error_with_lone_surrogates_is_told(pool: GraderPool) -> None:
    (result,) = await do(pool, ["raise \\ud800"])
    assert "could not convert" in result.message


BROKEN = "import os\nif os.environ.get('BROKEN') == '1':\n    {deed}\n"
SCORER = "from shoal.reward import reward\n@reward(name={name!r}, version='1')\ndef f(prompt, response, row):\n    return {value}\n"


def user_file(folder: Path, name: str, text: str = "", value: str = "1.0") -> Path:
    file = folder / f"{name}.py"
    file.write_text(text + SCORER.format(name=name, value=value))
    load_modules([str(file)])
    return file


@asynccontextmanager
async def pool_of(file: Path, scorer: Scorer) -> AsyncIterator[GraderPool]:
    pool = GraderPool(RewardServiceSettings(modules=(str(file),), workers=1), [scorer])
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@pytest.mark.parametrize(
    ("deed", "limit_s", "message"),
    [
        ("raise RuntimeError('no licence')", LONG_S, "RuntimeError: no licence"),
        ("os._exit(7)", LONG_S, "exited with code 7 before it had scored anything"),
        ("while True: pass", 2.0, "had not loaded its modules at the time limit of 2 s"),
    ],
)
async def test_start_fails_with_the_reason_when_a_grader_cannot_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str, limit_s: float, message: str
) -> None:
    name = f"broken_{abs(hash(deed))}"
    file = user_file(tmp_path, name, BROKEN.format(deed=deed))
    monkeypatch.setenv("BROKEN", "1")
    pool = GraderPool(RewardServiceSettings(modules=(str(file),), workers=1, prepare_timeout_s=limit_s), [REGISTRY.get(name)])
    with pytest.raises(ConfigError) as error:
        await pool.start()
    assert message in str(error.value)
    assert pool.process_ids == []


async def test_start_fails_when_the_memory_limit_is_below_an_empty_grader() -> None:
    with pytest.raises(ConfigError, match=r"worker_memory_bytes is 67108864, and an empty grader has \d+ bytes already"):
        async with running_pool(worker_memory_bytes=64 << 20):
            pass


async def test_grader_that_is_replaced_has_the_code_that_the_service_started_with(tmp_path: Path) -> None:
    (tmp_path / "constant_of_test.py").write_text("VALUE = 1.0\n")
    file = user_file(tmp_path, "edited", "from constant_of_test import VALUE\n", value="VALUE")
    scorer = REGISTRY.get("edited")
    async with pool_of(file, scorer) as pool:
        for text in ("VALUE = 2.0\n", "raise SystemExit\n"):
            (tmp_path / "constant_of_test.py").write_text(text)
            file.write_text(SCORER.format(name="renamed", value=3.0))
            assert [result.value for result in await pool.score(scorer, messages(["x"]), LONG_S)] == [1.0]
            os.kill(pool.process_ids[0], signal.SIGKILL)
        assert [result.value for result in await pool.score(scorer, messages(["x"]), LONG_S)] == [1.0]


async def test_scorer_with_another_fingerprint_in_its_grader_is_not_used(tmp_path: Path) -> None:
    file = user_file(tmp_path, "other_code")
    scorer = dataclasses.replace(REGISTRY.get("other_code"), fingerprint="of-another")
    async with pool_of(file, scorer) as pool:
        (result,) = await pool.score(scorer, messages(["x"]), LONG_S)
    assert result.message == (
        "what stands behind other_code@1 has changed since the service started: give it a new version and restart the service"
    )


async def test_graders_that_do_not_start_any_more_are_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_FIRST_BACKOFF_S", 0.02)
    file = user_file(tmp_path, "breaks_later", BROKEN.format(deed="raise RuntimeError('no licence')"))
    scorer = REGISTRY.get("breaks_later")
    async with pool_of(file, scorer) as pool:
        assert [result.value for result in await pool.score(scorer, messages(["x"]), LONG_S)] == [1.0]
        monkeypatch.setenv("BROKEN", "1")
        os.kill(pool.process_ids[0], signal.SIGKILL)
        (result,) = await pool.score(scorer, messages(["x"]), LONG_S)
        assert result.message.startswith("no grader runs: reward.modules: cannot load")
        assert "RuntimeError: no licence" in result.message
        monkeypatch.delenv("BROKEN")
        # The next attempt is a while away, but it comes.
        async with asyncio.timeout(LONG_S):
            while (await pool.score(scorer, messages(["x"]), LONG_S))[0].status != SCORE_STATUS_SCORED:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
