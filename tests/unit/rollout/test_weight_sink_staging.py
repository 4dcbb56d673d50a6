"""What staging holds from push to push, and what an audit reads.

Invariants: staging counts as complete only between a verified push and the next plan; a bucket that is not sent is right only if its bytes
are; the live weights after a commit are the trainer's, whatever was staged, aborted or left out before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from shoal_rollout import sink_workers

from shoal.errors import StateError, TransportError
from shoal.types.weights import BucketEncoding, StagedVersion
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.push_trainer import SECURITY
from tests.helpers.sink_rig import SinkRig, open_rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SinkRig]:
    async with open_rig(tmp_path) as opened:
        yield opened


@pytest.fixture
async def two_workers(tmp_path: Path) -> AsyncIterator[SinkRig]:
    async with open_rig(tmp_path, num_workers=2) as opened:
        yield opened


@pytest.fixture
async def unreadable(tmp_path: Path) -> AsyncIterator[SinkRig]:
    async with open_rig(tmp_path, unreadable=("b",)) as opened:
        yield opened


async def test_staging_is_complete_from_verify_until_the_next_plan(rig: SinkRig) -> None:
    assert (await rig.to_prepared()).staged is None
    await rig.to_verified()
    expected = StagedVersion(source_id="gang", policy_version=1)
    assert (await rig.to_prepared()).staged == expected
    await rig.commit()
    assert (await rig.to_prepared("b", 2)).staged == expected
    await rig.to_planned("b", 2)
    assert (await rig.to_prepared("b", 2)).staged is None
    await rig.to_verified("b", 2)
    assert (await rig.to_prepared("b", 2)).staged == replace(expected, policy_version=2)


async def test_an_abort_before_the_plan_leaves_staging_complete(rig: SinkRig) -> None:
    await rig.push_all()
    await rig.to_prepared("b", 2)
    await rig.sink.abort("b")
    assert (await rig.to_prepared("c", 3)).staged == StagedVersion(source_id="gang", policy_version=1)


async def test_an_abort_after_verify_leaves_staging_at_the_aborted_version(rig: SinkRig) -> None:
    await rig.push_all()
    await rig.to_verified("b", 2)
    await rig.sink.abort("b")
    prepared = await rig.to_prepared("c", 3)
    assert (prepared.staged, prepared.served_version) == (StagedVersion(source_id="gang", policy_version=2), 1)


async def test_an_abort_during_the_transfer_leaves_nothing_and_fences_who_still_writes(rig: SinkRig) -> None:
    await rig.push_all()
    prepared = await rig.to_prepared("b", 2)
    plan = rig.trainer.plan(prepared.layout)
    await rig.to_planned("b", 2)
    late = open_source_transport(rig.push, SECURITY)
    request = LinkRequest(
        push_id="b",
        policy_version=2,
        rank=0,
        world_size=1,
        server_id="rollout-0",
        worker=prepared.layout.workers[0],
        num_workers=1,
        collective_group="",
        timeout_s=5.0,
    )
    link = late.open(request, "shm")
    await rig.sink.abort("b")
    after = await rig.to_prepared("c", 3)
    assert after.staged is None
    assert after.layout.workers[0].endpoints["shm"] != prepared.layout.workers[0].endpoints["shm"]
    rig.set(a=7, b=8, c=9)
    await rig.to_planned("c", 3)
    pairs = await rig.write("c", 3)
    bucket = plan.buckets(0, 0)[0]
    with pytest.raises(TransportError):
        link.write_dense(bucket, [rig.trainer.tensors["a"] * 0])
    await rig.sink.verify("c", 3, rig.trainer.plan(after.layout).plan_hash, pairs)
    await rig.commit("c", 3)
    assert rig.live() == {"a": 7, "b": 8, "c": 9}
    late.close()


async def test_a_new_server_has_nothing_staged_although_files_of_the_old_one_are_there(rig: SinkRig, tmp_path: Path) -> None:
    await rig.push_all()
    fresh = SinkRig(tmp_path / "fresh")
    fresh.folder.mkdir()
    prepared = await fresh.to_prepared("b", 2)
    assert (prepared.staged, prepared.served_version) == (None, 0)
    await fresh.close()
    fresh.folder.rmdir()


async def test_a_staging_file_that_was_removed_is_made_anew_and_is_not_complete(rig: SinkRig) -> None:
    await rig.push_all()
    (path,) = rig.folder.iterdir()
    path.unlink()
    prepared = await rig.to_prepared("b", 2)
    assert prepared.staged is None
    assert await asyncio.to_thread(Path(prepared.layout.workers[0].endpoints["shm"]).exists)


async def test_an_aborted_push_is_swapped_in_with_the_next_one_that_leaves_it_out(rig: SinkRig) -> None:
    rig.set(a=1, b=1, c=1)
    await rig.push_all("one", 1)
    rig.set(a=2)
    await rig.to_verified("two", 2, unchanged=("b", "c"))
    await rig.sink.abort("two")
    assert rig.live() == {"a": 1, "b": 1, "c": 1}
    # The trainer's `a` is as staging holds it since the aborted push, so only `b` is sent.
    rig.set(b=3)
    await rig.push_all("three", 3, unchanged=("a", "c"))
    assert rig.live() == {"a": 2, "b": 3, "c": 1}
    assert rig.models[0].prepared[-1] == {"a", "b"}
    await rig.push_all("four", 4, unchanged=("a", "b", "c"))
    assert rig.models[0].prepared[-1] == frozenset()
    assert rig.live() == {"a": 2, "b": 3, "c": 1}


async def test_a_push_that_broke_off_is_swapped_in_whole_with_the_next_one(rig: SinkRig) -> None:
    rig.set(a=1, b=1, c=1)
    await rig.push_all("one", 1)
    rig.set(a=2)
    await rig.to_planned("two", 2)
    await rig.write("two", 2)
    await rig.sink.abort("two")
    await rig.push_all("three", 3)
    assert rig.models[0].prepared[-1] == {"a", "b", "c"}
    assert rig.live() == {"a": 2, "b": 1, "c": 1}


async def test_an_unchanged_bucket_that_staging_does_not_hold_is_refused(rig: SinkRig) -> None:
    rig.set(a=1, b=1, c=1)
    await rig.push_all("one", 1)
    rig.set(b=2)
    plan_hash = await rig.to_planned("two", 2)
    pairs = await rig.write("two", 2, unchanged=("b",))
    assert pairs[0].encodings[1] is BucketEncoding.UNCHANGED
    with pytest.raises(StateError, match=r"staged bytes of b .* which were not sent, differ"):
        await rig.sink.verify("two", 2, plan_hash, pairs)
    assert rig.sink.staged is None


async def test_unchanged_buckets_are_not_trusted_after_a_push_that_broke_off(rig: SinkRig) -> None:
    rig.set(a=1, b=1, c=1)
    await rig.push_all("one", 1)
    rig.set(a=2, b=2, c=2)
    await rig.to_planned("two", 2)
    await rig.write("two", 2)
    await rig.sink.abort("two")
    # As if the trainer believed that version 1 were still staged.
    rig.set(a=1, b=1, c=3)
    plan_hash = await rig.to_planned("three", 3)
    pairs = await rig.write("three", 3, unchanged=("a", "b"))
    with pytest.raises(StateError, match=r"staged bytes of a .* which were not sent, differ"):
        await rig.sink.verify("three", 3, plan_hash, pairs)


async def test_buckets_of_another_plan_are_hashed_again(rig: SinkRig) -> None:
    rig.set(a=1, b=2, c=3)
    await rig.push_all("one", 1)
    # Other buckets of the same bytes: digests kept from the last plan say nothing about them.
    rig.push = rig.push.model_copy(update={"bucket_bytes": 8192})
    rig.sink._section = rig.push
    rig.trainer._push = rig.push
    plan_hash = await rig.to_planned("two", 2)
    pairs = await rig.write("two", 2, unchanged=("a", "b", "c"))
    assert len(pairs[0].xxh3) == 2
    await rig.sink.verify("two", 2, plan_hash, pairs)
    await rig.commit("two", 2)
    assert rig.models[0].prepared[-1] == frozenset()
    assert rig.live() == {"a": 1, "b": 2, "c": 3}


async def test_every_worker_gets_its_buckets_and_one_wrong_worker_stops_all(two_workers: SinkRig) -> None:
    rig = two_workers
    rig.set(a=1, b=2, c=3)
    plan_hash = await rig.to_planned()
    pairs = await rig.write()
    assert [(pair.rank, pair.worker_rank) for pair in pairs] == [(0, 0), (0, 1)]
    wrong = (pairs[0], replace(pairs[1], xxh3=(*pairs[1].xxh3[:2], 1)))
    with pytest.raises(StateError, match=r"staged bytes of c .*worker 1"):
        await rig.sink.verify("a", 1, plan_hash, wrong)
    # Worker 0 was right, and is checked again.
    await rig.sink.verify("a", 1, plan_hash, pairs)
    await rig.commit()
    assert rig.live(0) == rig.live(1) == {"a": 1, "b": 2, "c": 3}
    rig.set(c=4)
    await rig.push_all("b", 2, unchanged=("a", "b"))
    assert rig.live(0) == rig.live(1) == {"a": 1, "b": 2, "c": 4}
    assert [model.prepared[-1] for model in rig.models] == [{"c"}, {"c"}]


async def test_a_long_plan_reaches_the_workers_in_parts(two_workers: SinkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_workers, "PART_PIECES", 2)
    rig = two_workers
    rig.set(a=1, b=2, c=3)
    await rig.push_all()
    assert rig.engine.calls.count("shoal_add_buckets") == 4
    assert rig.live(0) == rig.live(1) == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(StateError, match="part 2 of plan hash came after 0 parts"):
        rig.engine.workers.call("shoal_add_buckets", "hash", 2, [[], []])


async def test_digests_of_the_live_weights_equal_the_trainers_zeros_of_either_sign(two_workers: SinkRig) -> None:
    rig = two_workers
    rig.set(a=1, b=-0.0, c=3)
    plan_hash = await rig.push_all()
    expected = rig.trainer.digests((await rig.to_prepared()).layout)
    assert await rig.sink.digest(1, plan_hash) == expected
    rig.models[1].weights["b"][3, 4] = 0.5
    live = await rig.sink.digest(1, plan_hash)
    assert live[0] == expected[0]
    assert [own == other for own, other in zip(live[1].xxh3, expected[1].xxh3, strict=True)] == [True, False, True]


async def test_only_the_served_version_and_a_known_plan_can_be_digested(rig: SinkRig) -> None:
    with pytest.raises(StateError, match="no plan hash"):
        await rig.sink.digest(0, "hash")
    plan_hash = await rig.push_all()
    with pytest.raises(StateError, match=r"serves version 1, .* version 2 cannot be digested"):
        await rig.sink.digest(2, plan_hash)
    with pytest.raises(StateError, match="no plan other"):
        await rig.sink.digest(1, "other")
    # Another push under way changes nothing of what is served.
    expected = await rig.sink.digest(1, plan_hash)
    rig.set(a=9)
    await rig.to_verified("b", 2)
    assert await rig.sink.digest(1, plan_hash) == expected


async def test_what_the_engine_does_not_show_is_digested_from_staging_if_that_is_what_is_served(unreadable: SinkRig) -> None:
    rig = unreadable
    rig.set(a=1, b=2, c=3)
    plan_hash = await rig.push_all()
    assert await rig.sink.digest(1, plan_hash) == rig.trainer.digests((await rig.to_prepared()).layout)
    rig.set(b=5)
    await rig.to_verified("b", 2)
    await rig.sink.abort("b")
    with pytest.raises(StateError, match="nothing readable of b"):
        await rig.sink.digest(1, plan_hash)


async def test_200_pushes_leave_no_files_behind(rig: SinkRig) -> None:
    for version in range(1, 201):
        rig.set(a=version)
        if version % 3 == 0:
            await rig.to_planned(f"broken-{version}", version)
            await rig.sink.abort(f"broken-{version}")
        await rig.push_all(f"push-{version}", version, unchanged=() if version % 3 == 0 else ("b", "c"))
        assert len(await asyncio.to_thread(lambda: list(rig.folder.iterdir()))) == 1
    assert rig.live()["a"] == 200
