"""One bad sample costs its grader, whatever it does; the others keep their scores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from shoal_reward.grading.pool import GraderPool

from shoal.telemetry.metrics import sample_value
from tests.helpers.grading import LONG_S, do, is_alive, running_pool, wait_until_gone

LIMIT_S = 0.5


@pytest.fixture
async def pool() -> AsyncIterator[GraderPool]:
    async with running_pool(sample_timeout_s=LIMIT_S, worker_memory_bytes=1 << 30) as pool:
        yield pool


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("endless", "killed at the time limit of 0.5 s (sample_timeout_s)"),
        ("backtrack", "killed at the time limit of 0.5 s (sample_timeout_s)"),
        ("sleep 60", "killed at the time limit of 0.5 s (sample_timeout_s)"),
        ("segfault", "killed by signal 11 (SIGSEGV)"),
        ("exit 0", "exited with code 0"),
        ("exit 3", "exited with code 3"),
        ("memory", "memory limit"),
        ("recurse", "RecursionError"),
        ("interrupt", "KeyboardInterrupt"),
        ("raise word", "ValueError"),
    ],
)
async def test_bad_sample_is_an_error_that_names_the_cause_and_the_others_are_scored(pool: GraderPool, deed: str, message: str) -> None:
    results = await do(pool, ["one", deed, "three", "fifth"])
    assert [str(result.status) for result in results] == ["scored", "error", "scored", "scored"]
    assert [result.value for result in results] == [3.0, 0.0, 5.0, 5.0]
    assert message in results[1].message


@pytest.mark.parametrize("deed", ["print", "alarm"])
async def test_sample_may_print_and_set_an_alarm(pool: GraderPool, deed: str) -> None:
    assert [result.value for result in await do(pool, [deed, "four", deed])] == [1.0, 4.0, 1.0]


async def test_forked_child_that_returns_does_not_answer_for_its_parent(pool: GraderPool) -> None:
    assert [result.value for result in await do(pool, ["fork", "four", "fork", "fifth"])] == [1.0, 4.0, 1.0, 5.0]


async def test_children_left_behind_are_killed_with_their_grader(pool: GraderPool, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    results = await do(pool, [f"children_endless {file}", "four"])
    assert [str(result.status) for result in results] == ["error", "scored"]
    await wait_until_gone([int(text) for text in file.read_text().split()])


def graders_and_their_forks() -> set[int]:
    """Processes whose command line is that of a grader of this process, forks of graders among them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"grading.worker\0--parent\0{os.getpid()}\0" in (folder / "cmdline").read_text():
                found.add(int(folder.name))
    return found


async def test_process_that_multiplies_is_killed_with_all_its_copies() -> None:
    async with running_pool(sample_timeout_s=2.0) as pool:
        scoring, most = asyncio.create_task(do(pool, ["bomb", "four"])), 0
        while not scoring.done():
            most = max(most, len(graders_and_their_forks()))
            await asyncio.wait((scoring,), timeout=0.05)
        assert most > 8
        assert [str(result.status) for result in await scoring] == ["error", "scored"]
        await wait_until_gone([process for process in graders_and_their_forks() if process not in pool.process_ids])


async def test_children_left_behind_do_not_hide_the_end_of_their_grader(pool: GraderPool, tmp_path: Path) -> None:
    (grader,) = pool.process_ids
    results = await do(pool, [f"children {tmp_path / 'pids'}", "exit 1", "four"])
    assert [str(result.status) for result in results] == ["scored", "error", "scored"]
    await wait_until_gone([grader])


async def test_grader_killed_from_outside_costs_the_sample_it_was_at(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with running_pool() as pool:
        await do(pool, ["warm"] * 10)
        (grader,) = pool.process_ids
        scoring = asyncio.create_task(do(pool, ["four", f"mark {mark}", "fifth"]))
        while not mark.exists():
            await asyncio.wait((scoring,), timeout=0.01)
        os.kill(grader, signal.SIGKILL)
        results = await scoring
    assert [str(result.status) for result in results] == ["scored", "error", "scored"]
    assert "killed by signal 9 (SIGKILL, out of memory or killed from outside)" in results[1].message


async def test_grader_killed_while_idle_is_replaced(pool: GraderPool) -> None:
    await do(pool, ["one"])
    (grader,) = pool.process_ids
    os.kill(grader, signal.SIGKILL)
    assert [result.value for result in await do(pool, ["four"])] == [4.0]
    assert pool.process_ids != [grader]


async def test_stopped_grader_is_replaced_and_blames_no_sample(pool: GraderPool) -> None:
    await do(pool, ["one"])
    (grader,) = pool.process_ids
    os.kill(grader, signal.SIGSTOP)
    assert [result.value for result in await do(pool, ["four"])] == [4.0]
    assert not is_alive(grader)


async def test_one_percent_of_bad_samples_lose_only_themselves() -> None:
    bad = {17: "endless", 133: "exit 1", 250: "segfault", 411: "backtrack", 555: "raise x", 640: "nan", 702: "memory", 811: "exit 9"}
    bad |= {903: "recurse", 990: "sleep 60"}
    async with running_pool(workers=2, sample_timeout_s=LIMIT_S, worker_memory_bytes=1 << 30) as pool:
        results = await do(pool, [bad.get(index, "x" * (index % 50)) for index in range(1000)])
    assert {index for index, result in enumerate(results) if str(result.status) == "error"} == set(bad)
    assert all(result.value == index % 50 for index, result in enumerate(results) if index not in bad)


async def test_kills_are_counted_by_cause(pool: GraderPool) -> None:
    def killed(cause: str) -> float:
        return sample_value("shoal_reward_killed_workers_total", {"cause": cause}) or 0.0

    before = killed("time_limit"), killed("died")
    await do(pool, ["endless", "exit 1", "exit 1"])
    assert (killed("time_limit") - before[0], killed("died") - before[1]) == (1.0, 2.0)


async def test_stop_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with running_pool(workers=2) as pool:
        await do(pool, [f"children {file}"])
        scoring = asyncio.create_task(do(pool, ["endless"] * 4, budget_s=LONG_S))
        await asyncio.sleep(0.1)
        processes = [*pool.process_ids, *map(int, file.read_text().split())]
        assert all(map(is_alive, processes))
    await wait_until_gone(processes)
    assert {str(result.status) for result in await scoring} == {"error"}
