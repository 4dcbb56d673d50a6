"""Moments of a swap that chance seldom finds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_stages import RouteStage

from shoal.errors import StateError
from tests.helpers.coordinator_fakes import FakeReward, reward_pool
from tests.helpers.route_fakes import WHO, WHY, add_in, begin
from tests.helpers.swap_load import SwapLoad
from tests.helpers.swap_modes import NUM_GROUPS, Mode, exact


async def test_gates_do_not_pass_on_a_comparison_with_a_revision_that_is_no_longer_active(tmp_path: Path, redis_url: str) -> None:
    gates = Gates(min_samples=8)
    async with SwapLoad(tmp_path, redis_url, Mode(name="stale"), seed=1) as load:
        lifecycle = load.path.lifecycle
        numbers = await load.add_ready(2)
        await lifecycle.shadow(numbers[0], 1.0, who=WHO, why=WHY)
        await load.flow_until(lambda: lifecycle.comparison(numbers[0]).num_samples >= 8)
        await lifecycle.activate(numbers[1], None, when_gates_pass=False, who=WHO, why=WHY)
        with pytest.raises(StateError, match="min_samples: 0 samples"):
            await lifecycle.activate(numbers[0], gates, when_gates_pass=False, who=WHO, why=WHY)
        await lifecycle.activate(numbers[0], gates, when_gates_pass=True, who=WHO, why=WHY)
        await lifecycle.shadow(numbers[0], 0.5, who=WHO, why=WHY)
        assert load.book.stage(numbers[0]) is RouteStage.SHADOW
        assert lifecycle.problems(load.book.record(numbers[0])) != []
        # Once live groups were compared with what is active now, the gates pass by themselves.
        await load.flow_until(lambda: load.book.stage(numbers[0]) is RouteStage.ACTIVE)


async def test_reward_that_hangs_holds_a_step_up_for_its_timeout_and_a_rollback_saves_the_step(tmp_path: Path, redis_url: str) -> None:
    def impatient(number: int) -> tuple[RouteComponent, ...]:
        return (replace(exact(1 + number), timeout_s=1.0),)

    async with SwapLoad(tmp_path, redis_url, Mode(name="hanging", components=impatient, pauses=True), seed=1) as load:
        (number,) = await load.add_ready(1)
        load.faults.hanging = frozenset({("exact", "2")})
        await load.path.lifecycle.activate(number, None, when_gates_pass=False, who=WHO, why=WHY)
        load.repair = partial(load.path.lifecycle.rollback, who=WHO, why=WHY)
        await load.flow_until(lambda: load.book.active_number == 1 and len(load.step_s) >= 2)
    # A call has a second for each of its groups; the rest is for a busy machine.
    assert 1.0 <= load.step_s[0] < NUM_GROUPS + 8.0
    assert load.step_s[1] < load.step_s[0]
    assert load.num_pauses == 1
    assert sorted(record.group_id for record in load.records) == sorted(2 * list(load.issued))
    assert {record.route_revision for record in load.records} == {1}


async def test_waiting_for_a_change_of_the_route_never_swallows_a_cancellation(tmp_path: Path) -> None:
    """A coordinator that is told to end while a group ends would go on for ever."""
    book = await begin(tmp_path)
    for num_turns in range(6):
        pin = book.pin()
        waiting = asyncio.create_task(book.wait_for_change(60.0))
        await asyncio.sleep(0.01)
        pin.release()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_waiting = waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() == was_waiting, num_turns
    book.close()


async def test_waiting_for_a_server_never_swallows_a_cancellation() -> None:
    """A step that is told to end while a server joins would ask it nevertheless."""
    for num_turns in range(6):
        pool = reward_pool()
        waiting = asyncio.create_task(pool.pick(60.0))
        await asyncio.sleep(0.01)
        pool.add("late", FakeReward())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_waiting = waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() == was_waiting, num_turns


async def test_command_whose_caller_went_away_is_carried_out_or_not_at_all(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    numbers = [await add_in(book, RouteStage.READY) for _ in range(6)]
    for num_turns, number in enumerate(numbers):
        command = asyncio.create_task(book.activate(number, who=WHO, why=WHY))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)
        # One change after another: this one comes last.
        await add_in(book, RouteStage.REGISTERED)
        assert book.entries(1000)[-1].active == book.active_number
        assert [record.revision.number for record in book.in_stage(RouteStage.ACTIVE)] == [book.active_number]
    book.close()
