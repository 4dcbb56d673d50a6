"""Stages of a push at one server over a scripted engine; staging, plans, digests and the workers' code are real.

Invariants: only the moves of the table happen; every stage repeats harmlessly; a push whose time is over is dropped wherever it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from shoal_rollout.sink_push import PushEnd
from shoal_rollout.sink_states import TRANSITIONS, SinkState, advance

from shoal.errors import CapacityError, InvalidRequestError, StateError, TransportError
from shoal.telemetry.metrics import sample_value
from shoal.types import InflightMode, SourceLayout
from shoal.types.weights import BucketEncoding, PairDigests
from tests.helpers.push_trainer import with_wrong_digest
from tests.helpers.sink_rig import SinkRig, open_rig

NO_PAIRS: tuple[PairDigests, ...] = ()
NO_SOURCE = SourceLayout(source_id="gang", tensors=(), places=())
_Stage = Callable[[SinkRig], Awaitable[object]]
STAGES: dict[str, _Stage] = {
    "plan": lambda rig: rig.sink.plan("a", 1, "hash", NO_SOURCE),
    "verify": lambda rig: rig.sink.verify("a", 1, "hash", NO_PAIRS),
    "commit": lambda rig: rig.commit(),
}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SinkRig]:
    async with open_rig(tmp_path) as opened:
        yield opened


def _num_ended(end: PushEnd) -> float:
    return sample_value("shoal_rollout_pushes_count_total", {"end": end.value}) or 0.0


@pytest.mark.parametrize(
    ("current", "following"), [(a, b) for a in SinkState for b in SinkState if b not in TRANSITIONS[a]], ids=lambda state: str(state)
)
def test_every_move_outside_of_the_table_is_refused(current: SinkState, following: SinkState) -> None:
    with pytest.raises(StateError, match=f"{current} cannot go to {following}"):
        advance(current, following)


async def test_push_goes_through_its_stages_in_order(rig: SinkRig) -> None:
    rig.set(a=1, b=2, c=3)
    prepared = await rig.to_prepared()
    assert (prepared.layout.server_id, prepared.served_version, prepared.staged) == ("rollout-0", 0, None)
    assert rig.sink.state is SinkState.PREPARED
    plan = rig.trainer.plan(prepared.layout)
    planned = await rig.sink.plan("a", 1, plan.plan_hash, rig.trainer.layout)
    assert (planned.num_buckets, planned.collective_group, rig.sink.state) == (3, "", SinkState.PLANNED)
    pairs = rig.trainer.write(prepared.layout)
    verified = await rig.sink.verify("a", 1, plan.plan_hash, pairs)
    assert (verified.num_bytes, rig.sink.state) == (3 * 4096, SinkState.VERIFIED)
    assert rig.live() == {"a": 0, "b": 0, "c": 0}
    committed = await rig.commit()
    assert (committed.policy_version, committed.num_aborted) == (1, 0)
    assert (rig.sink.state, rig.sink.served_version, rig.committed) == (SinkState.COMMITTED, 1, [1])
    assert rig.live() == {"a": 1, "b": 2, "c": 3}
    assert sample_value("shoal_server_policy_version", {"server": "rollout-0"}) == 1


async def test_every_stage_repeats_without_doing_anything(rig: SinkRig) -> None:
    plan_hash = await rig.to_planned()
    pairs = await rig.write()
    verified = await rig.sink.verify("a", 1, plan_hash, pairs)
    calls = len(rig.engine.calls)
    prepared = await rig.to_prepared()
    assert prepared == await rig.to_prepared()
    assert (await rig.sink.plan("a", 1, plan_hash, rig.trainer.layout)).num_buckets == 3
    assert await rig.sink.verify("a", 1, plan_hash, pairs) == verified
    assert len(rig.engine.calls) == calls
    first = await rig.commit()
    calls = len(rig.engine.calls)
    assert await rig.commit() == first
    assert (await rig.to_prepared()).served_version == 1
    assert (await rig.sink.plan("a", 1, plan_hash, rig.trainer.layout)).num_buckets == 3
    assert len(rig.engine.calls) == calls
    assert rig.committed == [1]


@pytest.mark.parametrize("stage", STAGES)
async def test_stages_before_prepare_are_refused(rig: SinkRig, stage: str) -> None:
    with pytest.raises(StateError, match="prepare first"):
        await STAGES[stage](rig)
    assert rig.engine.calls == []


async def test_stages_out_of_order_are_refused(rig: SinkRig) -> None:
    await rig.to_prepared()
    for stage in ("verify", "commit"):
        with pytest.raises(StateError, match="push a is prepared; this call needs it to be"):
            await STAGES[stage](rig)
    plan_hash = await rig.to_planned()
    with pytest.raises(StateError, match="push a is planned; this call needs it to be verified"):
        await rig.commit()
    pairs = await rig.write()
    await rig.sink.verify("a", 1, plan_hash, pairs)
    await rig.commit()
    with pytest.raises(StateError, match="push a is committed"):
        await rig.sink.verify("a", 1, plan_hash, pairs)
    assert rig.engine.calls.count("shoal_commit") == 1


async def test_another_push_or_version_is_refused_and_both_are_named(rig: SinkRig) -> None:
    plan_hash = await rig.to_verified()
    with pytest.raises(StateError, match="at push a for version 1, not at push b for version 1"):
        await rig.sink.verify("b", 1, plan_hash, NO_PAIRS)
    with pytest.raises(StateError, match="for version 1, not 2; use a new push_id"):
        await rig.to_prepared("a", 2)
    with pytest.raises(StateError, match="not at push a for version 2"):
        await rig.commit("a", 2)
    assert rig.engine.calls.count("pause keep") == 0


@pytest.mark.parametrize(("push_id", "version", "expires_s"), [("", 1, 1.0), ("a", -1, 1.0), ("a", 1, 0.0), ("a", 1, float("nan"))])
async def test_calls_that_name_no_push_are_refused(rig: SinkRig, push_id: str, version: int, expires_s: float) -> None:
    with pytest.raises(InvalidRequestError):
        await rig.sink.prepare(push_id, version, expires_s)
    assert rig.sink.state is SinkState.IDLE


async def test_plans_that_differ_are_refused_and_both_hashes_are_named(rig: SinkRig) -> None:
    own = rig.trainer.plan((await rig.to_prepared()).layout).plan_hash
    with pytest.raises(StateError, match=f"this server's plan is {own}, the caller's other"):
        await rig.sink.plan("a", 1, "other", rig.trainer.layout)
    assert (rig.sink.state, "shoal_plan" in rig.engine.calls) == (SinkState.PREPARED, False)
    await rig.sink.plan("a", 1, own, rig.trainer.layout)
    for call in (rig.sink.plan("a", 1, "other", rig.trainer.layout), rig.sink.verify("a", 1, "other", NO_PAIRS)):
        with pytest.raises(StateError, match="the caller's other"):
            await call


async def test_a_trainer_that_lacks_a_tensor_cannot_be_planned(rig: SinkRig) -> None:
    await rig.to_prepared()
    short = replace(rig.trainer.layout, tensors=rig.trainer.layout.tensors[1:])
    with pytest.raises(TransportError, match="needs a"):
        await rig.sink.plan("a", 1, "hash", short)
    assert rig.sink.state is SinkState.PREPARED


def _without_bucket(pairs: tuple[PairDigests, ...]) -> tuple[PairDigests, ...]:
    return (replace(pairs[0], xxh3=pairs[0].xxh3[:-1], encodings=pairs[0].encodings[:-1]),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: (), "beginning with a, was planned but not written"),
        (_without_bucket, "has 3 buckets, beginning with a, but 2 digests"),
        (lambda pairs: (*pairs, pairs[0]), "reported twice"),
        (lambda pairs: (replace(pairs[0], worker_rank=3),), "rank 0 to worker 3 was written but not planned"),
    ],
    ids=["absent pair", "absent bucket", "pair twice", "unknown worker"],
)
async def test_digests_that_do_not_cover_the_plan_are_refused(
    rig: SinkRig, change: Callable[[tuple[PairDigests, ...]], tuple[PairDigests, ...]], message: str
) -> None:
    plan_hash = await rig.to_planned()
    pairs = await rig.write()
    with pytest.raises(StateError, match=message):
        await rig.sink.verify("a", 1, plan_hash, change(pairs))
    assert (rig.sink.state, rig.sink.staged) == (SinkState.PLANNED, None)


async def test_a_wrong_digest_names_the_parameter_and_nothing_can_be_committed(rig: SinkRig) -> None:
    plan_hash = await rig.to_planned()
    pairs = await rig.write()
    with pytest.raises(StateError, match=r"staged bytes of b .*worker 0 \(bucket 1 of rank 0\) differ"):
        await rig.sink.verify("a", 1, plan_hash, with_wrong_digest(pairs, 1))
    assert rig.sink.staged is None
    with pytest.raises(StateError, match="is planned"):
        await rig.commit()
    # What was wrong was the telling, so that the same push can still be verified.
    await rig.sink.verify("a", 1, plan_hash, pairs)
    await rig.commit()
    assert rig.failed == []


async def test_a_new_push_replaces_one_that_is_not_committed(rig: SinkRig) -> None:
    replaced = _num_ended(PushEnd.REPLACED)
    await rig.to_verified("a", 1)
    await rig.to_verified("b", 2)
    with pytest.raises(StateError, match="not at push a"):
        await rig.commit("a", 1)
    assert (await rig.commit("b", 2)).policy_version == 2
    assert _num_ended(PushEnd.REPLACED) == replaced + 1


async def test_a_prepare_that_fails_leaves_nothing_of_the_push_before_it(rig: SinkRig) -> None:
    await rig.to_verified("a", 1)
    rig.engine.failures["shoal_prepare"] = CapacityError("no space")
    with pytest.raises(CapacityError):
        await rig.to_prepared("b", 2)
    # The workers may have let go of it already: a commit would find nothing to swap, after it had paused.
    with pytest.raises(StateError, match="at no push"):
        await rig.commit("a", 1)
    assert (rig.sink.state, rig.failed) == (SinkState.IDLE, [])


@pytest.mark.parametrize("stage", ["prepared", "planned", "verified"])
async def test_abort_drops_a_push_at_every_stage_and_repeats(rig: SinkRig, stage: str) -> None:
    aborted = _num_ended(PushEnd.ABORTED)
    reach = {"prepared": rig.to_prepared, "planned": rig.to_planned, "verified": rig.to_verified}
    await reach[stage]()
    assert await rig.sink.abort("a") == 0
    assert await rig.sink.abort("a") == 0
    assert (rig.sink.state, rig.engine.calls.count("shoal_drop")) == (SinkState.IDLE, 1)
    assert _num_ended(PushEnd.ABORTED) == aborted + 1
    for call in STAGES:
        with pytest.raises(StateError, match="at no push"):
            await STAGES[call](rig)
    rig.set(a=5)
    await rig.push_all("a", 1)
    assert rig.live()["a"] == 5


async def test_abort_ignores_unknown_pushes_and_refuses_a_committed_one(rig: SinkRig) -> None:
    assert await rig.sink.abort("unknown") == 0
    await rig.push_all()
    assert await rig.sink.abort("unknown") == 1
    with pytest.raises(StateError, match="committed cannot go to idle"):
        await rig.sink.abort("a")


async def test_reserve_allocates_before_any_push_or_says_that_there_is_no_room(rig: SinkRig) -> None:
    await rig.sink.reserve()
    assert (rig.engine.calls, rig.sink.state, len(list(rig.folder.iterdir()))) == (["shoal_prepare"], SinkState.IDLE, 1)
    rig.engine.failures["shoal_prepare"] = CapacityError("no space")
    with pytest.raises(CapacityError, match="no space"):
        await rig.sink.reserve()


@pytest.mark.parametrize("stage", ["prepared", "planned", "verified"])
async def test_a_push_expires_at_every_stage(rig: SinkRig, stage: str) -> None:
    expired = _num_ended(PushEnd.EXPIRED)
    reached, release = rig.engine.hold("shoal_drop")
    reach = {"prepared": rig.to_prepared, "planned": rig.to_planned, "verified": rig.to_verified}
    await reach[stage](expires_s=0.5)
    await asyncio.wait_for(reached.wait(), 5)
    # The push is over before the workers know.
    assert (rig.sink.state, rig.sink.served_version) == (SinkState.IDLE, 0)
    release.set()
    with pytest.raises(StateError, match="at no push"):
        await rig.commit()
    assert _num_ended(PushEnd.EXPIRED) == expired + 1


async def test_a_push_that_expires_ends_although_the_workers_cannot_be_told(rig: SinkRig) -> None:
    rig.engine.failures["shoal_drop"] = StateError("stuck")
    reached, _ = rig.engine.hold("shoal_drop")
    rig.engine.gates["shoal_drop"].set()
    await rig.to_verified(expires_s=0.5)
    await asyncio.wait_for(reached.wait(), 5)
    rig.set(a=3)
    await rig.push_all("b", 2)
    assert rig.live()["a"] == 3


async def test_a_repeated_prepare_does_not_set_the_clock_anew(rig: SinkRig) -> None:
    reached, release = rig.engine.hold("shoal_drop")
    release.set()
    await rig.to_prepared(expires_s=0.2)
    await rig.to_prepared(expires_s=60.0)
    await asyncio.wait_for(reached.wait(), 5)


async def test_a_verify_ends_when_the_time_of_its_push_is_over(rig: SinkRig) -> None:
    reached, release = rig.engine.hold("shoal_start_verify")
    plan_hash = await rig.to_planned(expires_s=0.5)
    pairs = await rig.write()
    verifying = asyncio.create_task(rig.sink.verify("a", 1, plan_hash, pairs))
    await reached.wait()
    await asyncio.sleep(0.55)
    release.set()
    with pytest.raises(StateError, match="push a for version 1 has expired"):
        await verifying
    assert rig.engine.calls.count("shoal_step_verify") == 0


async def test_a_committed_push_does_not_expire(rig: SinkRig) -> None:
    expired = _num_ended(PushEnd.EXPIRED)
    await rig.to_verified(expires_s=0.5)
    await rig.commit()
    await asyncio.sleep(0.6)
    assert (rig.sink.state, _num_ended(PushEnd.EXPIRED)) == (SinkState.COMMITTED, expired)


async def test_a_commit_that_runs_when_the_time_is_over_is_finished(rig: SinkRig) -> None:
    expired = _num_ended(PushEnd.EXPIRED)
    reached, release = rig.engine.hold("shoal_commit")
    await rig.to_verified(expires_s=0.5)
    committing = asyncio.create_task(rig.commit())
    await reached.wait()
    await asyncio.sleep(0.6)
    release.set()
    assert (await committing).policy_version == 1
    await asyncio.sleep(0)
    assert (rig.sink.state, _num_ended(PushEnd.EXPIRED)) == (SinkState.COMMITTED, expired)


async def test_a_refused_commit_does_not_keep_its_push_beyond_its_time(rig: SinkRig) -> None:
    reached, release = rig.engine.hold("shoal_drop")
    release.set()
    await rig.to_verified(expires_s=0.5)
    sampling = asyncio.create_task(rig.engine.sample("r", [1], rig.sampling(4)))
    await rig.engine.until_requests(1)
    with pytest.raises(StateError, match="did not end"):
        await rig.sink.commit("a", 1, InflightMode.WAIT, 1.5)
    await asyncio.wait_for(reached.wait(), 5)
    assert rig.sink.state is SinkState.IDLE
    rig.engine.step(4)
    await sampling


async def test_encodings_reach_the_workers(rig: SinkRig) -> None:
    rig.set(a=1)
    await rig.push_all()
    rig.set(b=2)
    plan_hash = await rig.to_planned("b", 2)
    pairs = await rig.write("b", 2, unchanged=("a", "c"))
    assert pairs[0].encodings == (BucketEncoding.UNCHANGED, BucketEncoding.DENSE, BucketEncoding.UNCHANGED)
    await rig.sink.verify("b", 2, plan_hash, pairs)
    await rig.commit("b", 2)
    assert rig.models[0].prepared[-1] == {"b"}
    assert rig.live() == {"a": 1, "b": 2, "c": 0}
