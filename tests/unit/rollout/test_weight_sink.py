"""Stages of a push at one server over a scripted engine.

Invariants: only the moves of the table happen; every stage repeats harmlessly; a commit, once begun, runs to its end whatever becomes of
its caller; a commit that fails half way is never followed by serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from shoal_rollout.sink_states import TRANSITIONS, SinkState, advance
from shoal_rollout.weight_sink import WeightSink

from shoal.config.models import PushSection
from shoal.errors import CapacityError, InternalError, InvalidRequestError, StateError
from shoal.types import Box, CopyDigest, SinkWorkerLayout
from tests.helpers.engine_fakes import FakeSwapper

COMMIT_CALLS = ["pause", "shoal_commit", "finish_swap 1", "resume"]
DIGESTS = [CopyDigest(worker_rank=0, parameter="p", parameter_box=Box(offsets=(0,), sizes=(4,)), xxh3=2**64 - 1)]


class _Rig:
    def __init__(self) -> None:
        layout = SinkWorkerLayout(worker_rank=0, parameters=(), regions=(), staging_path="/dev/shm/x", staging_bytes=64)
        self.engine = FakeSwapper(layouts=(layout,))
        self.committed: list[int] = []
        self.failed: list[str] = []
        self.sink = WeightSink(
            self.engine,
            server_id="rollout-0",
            staging_name="run-rollout-0-p1",
            push=PushSection(),
            on_committed=self.committed.append,
            on_failed=self.failed.append,
        )

    async def to_verified(self, push_id: str = "a", version: int = 1) -> None:
        await self.sink.prepare(push_id, version)
        await self.sink.verify(push_id, version, "hash", DIGESTS)


@pytest.fixture
def rig() -> _Rig:
    return _Rig()


@pytest.mark.parametrize(
    ("current", "following"), [(a, b) for a in SinkState for b in SinkState if b not in TRANSITIONS[a]], ids=lambda state: str(state)
)
def test_every_move_outside_of_the_table_is_refused(current: SinkState, following: SinkState) -> None:
    with pytest.raises(StateError, match=f"{current} cannot go to {following}"):
        advance(current, following)


async def test_push_goes_through_its_stages_in_order(rig: _Rig) -> None:
    layout, served = await rig.sink.prepare("a", 1)
    assert (layout.server_id, served) == ("rollout-0", 0)
    verified = await rig.sink.verify("a", 1, "hash", DIGESTS)
    assert verified.num_bytes == 100
    committed = await rig.sink.commit("a", 1)
    assert committed.policy_version == 1
    assert rig.engine.calls == [
        "shoal_prepare",
        "shoal_start_verify",
        "shoal_step_verify",
        "shoal_step_verify",
        *COMMIT_CALLS,
        "shoal_drop",
    ]
    assert (rig.sink.state, rig.sink.served_version, rig.committed) == (SinkState.COMMITTED, 1, [1])


async def test_every_stage_repeats_without_doing_anything(rig: _Rig) -> None:
    await rig.to_verified()
    calls = len(rig.engine.calls)
    await rig.sink.prepare("a", 1)
    await rig.sink.verify("a", 1, "hash", DIGESTS)
    assert len(rig.engine.calls) == calls
    first = await rig.sink.commit("a", 1)
    calls = len(rig.engine.calls)
    assert await rig.sink.commit("a", 1) == first
    assert (await rig.sink.prepare("a", 1))[1] == 1
    assert len(rig.engine.calls) == calls
    assert rig.committed == [1]


@pytest.mark.parametrize(
    "call",
    [
        lambda sink: sink.verify("a", 1, "hash", DIGESTS),
        lambda sink: sink.commit("a", 1),
    ],
    ids=["verify", "commit"],
)
async def test_stages_before_prepare_are_refused(rig: _Rig, call: Callable[[WeightSink], Awaitable[object]]) -> None:
    with pytest.raises(StateError, match="prepare first"):
        await call(rig.sink)
    assert rig.engine.calls == []


async def test_wrong_push_version_plan_and_stage_are_refused(rig: _Rig) -> None:
    await rig.sink.prepare("a", 1)
    with pytest.raises(StateError, match="is prepared"):
        await rig.sink.commit("a", 1)
    with pytest.raises(StateError, match="push a for version 1, not at push b"):
        await rig.sink.verify("b", 1, "hash", DIGESTS)
    with pytest.raises(StateError, match="use a new push_id"):
        await rig.sink.prepare("a", 2)
    await rig.sink.verify("a", 1, "hash", DIGESTS)
    with pytest.raises(StateError, match="verified for plan hash, not other"):
        await rig.sink.verify("a", 1, "other", DIGESTS)
    with pytest.raises(StateError, match="for version 2"):
        await rig.sink.commit("a", 2)
    for push_id, version in (("", 1), ("a", -1)):
        with pytest.raises(InvalidRequestError):
            await rig.sink.prepare(push_id, version)
    assert "pause" not in rig.engine.calls


async def test_a_new_push_replaces_one_that_is_not_committed(rig: _Rig) -> None:
    await rig.to_verified("a", 1)
    await rig.to_verified("b", 2)
    with pytest.raises(StateError, match="not at push a"):
        await rig.sink.commit("a", 1)
    assert (await rig.sink.commit("b", 2)).policy_version == 2


async def test_abort_drops_a_push_repeats_and_refuses_a_committed_one(rig: _Rig) -> None:
    assert await rig.sink.abort("unknown") == 0
    await rig.to_verified()
    assert await rig.sink.abort("a") == 0
    assert await rig.sink.abort("a") == 0
    assert rig.engine.calls.count("shoal_drop") == 1
    with pytest.raises(StateError):
        await rig.sink.commit("a", 1)
    await rig.to_verified("b", 2)
    rig.engine.failures["shoal_drop"] = StateError("old weights are stuck")
    await rig.sink.commit("b", 2)
    with pytest.raises(StateError, match="committed cannot go to idle"):
        await rig.sink.abort("b")


async def test_reserve_allocates_before_any_push_or_says_that_there_is_no_room(rig: _Rig) -> None:
    await rig.sink.reserve()
    assert (rig.engine.calls, rig.sink.state) == (["shoal_prepare"], SinkState.IDLE)
    rig.engine.failures["shoal_prepare"] = CapacityError("no space")
    with pytest.raises(CapacityError, match="no space"):
        await rig.sink.reserve()


async def test_a_failed_prepare_or_verify_changes_nothing(rig: _Rig) -> None:
    rig.engine.failures["shoal_prepare"] = CapacityError("no space")
    with pytest.raises(CapacityError):
        await rig.sink.prepare("a", 1)
    assert rig.sink.state is SinkState.IDLE
    rig.engine.failures = {"shoal_start_verify": StateError("p was not written")}
    await rig.sink.prepare("a", 1)
    with pytest.raises(StateError, match="p was not written"):
        await rig.sink.verify("a", 1, "hash", DIGESTS)
    rig.engine.failures = {}
    await rig.sink.verify("a", 1, "hash", DIGESTS)
    await rig.sink.commit("a", 1)
    assert rig.failed == []


async def test_a_commit_outlives_its_caller_and_a_repeat_waits_for_it(rig: _Rig) -> None:
    await rig.to_verified()
    reached, release = rig.engine.hold("shoal_commit")
    caller = asyncio.create_task(rig.sink.commit("a", 1))
    await reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    repeat = asyncio.create_task(rig.sink.commit("a", 1))
    for refused in (rig.sink.abort("a"), rig.sink.prepare("b", 2), rig.sink.verify("a", 1, "hash", DIGESTS)):
        with pytest.raises(StateError):
            await refused
    release.set()
    assert (await repeat).policy_version == 1
    assert rig.engine.calls[-5:] == [*COMMIT_CALLS, "shoal_drop"]


@pytest.mark.parametrize("call", COMMIT_CALLS)
async def test_a_commit_that_fails_half_way_ends_serving(rig: _Rig, call: str) -> None:
    await rig.to_verified()
    rig.engine.failures[call] = RuntimeError("worker died")
    with pytest.raises(InternalError, match="stopped serving: worker died"):
        await rig.sink.commit("a", 1)
    assert rig.sink.state is SinkState.FAILED
    assert len(rig.failed) == 1
    if call != "resume":
        assert "resume" not in rig.engine.calls
    for refused in (rig.sink.prepare("b", 2), rig.sink.commit("a", 1), rig.sink.abort("a")):
        with pytest.raises(StateError):
            await refused


async def test_digests_of_an_unknown_worker_are_refused(rig: _Rig) -> None:
    await rig.sink.prepare("a", 1)
    stray = CopyDigest(worker_rank=3, parameter="p", parameter_box=Box(offsets=(0,), sizes=(4,)), xxh3=1)
    with pytest.raises(StateError, match="digests name worker 3"):
        await rig.sink.verify("a", 1, "hash", [stray])
