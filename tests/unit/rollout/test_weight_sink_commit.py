"""Commits over an engine that the test steps token by token.

Invariants: every client gets an answer; a token carries the version, and the log-probability, of the weights that produced it; a request
that arrives during a commit runs on the new version only; a commit, once begun, runs to its end whatever becomes of its caller; one that
fails half way is never followed by serving, and one that is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from shoal_rollout.generation import Generation
from shoal_rollout.request_checks import GenerateCall
from shoal_rollout.sink_states import SinkState

from shoal.errors import InternalError, StateError
from shoal.types import Completion, FinishReason, InflightMode
from tests.helpers.sink_rig import SinkRig, open_rig

COMMIT_CALLS = ["pause keep", "shoal_commit", "finish_swap 1", "resume"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SinkRig]:
    async with open_rig(tmp_path) as opened:
        yield opened


def _generation(rig: SinkRig) -> Generation:
    return Generation(rig.engine, engine_id="rollout-0", vocab_size=101, max_model_len=128, eos_ids=(2,))


async def _generate(generation: Generation, rig: SinkRig, name: str) -> Completion:
    call = GenerateCall(request_id=name, prompt_ids=[1], sampling=rig.sampling(64), num_samples=1)
    (completion,) = [completion async for completion in generation.generate(call)]
    return completion


def _versions(completion: Completion) -> list[tuple[int, int, int]]:
    return [(span.policy_version, span.start, span.end) for span in completion.policy_version_spans]


class _Scene:
    """Version 1 is served; a 64-token generation has 30 tokens; version 2 is verified."""

    def __init__(self, rig: SinkRig) -> None:
        self.rig = rig
        self.generation = _generation(rig)
        self.early: asyncio.Task[Completion]
        self.late: asyncio.Task[Completion]

    async def open(self) -> None:
        self.rig.set(a=-1.0)
        await self.rig.push_all("one", 1)
        self.early = asyncio.create_task(_generate(self.generation, self.rig, "early"))
        await self.rig.engine.until_requests(1)
        self.rig.engine.step(30)
        self.rig.set(a=-2.0)
        await self.rig.to_verified("two", 2)

    async def commit_while_one_arrives(self, inflight: InflightMode, *, held_at: str) -> None:
        """Begin the commit, let a request arrive when it is inside a call, and go on."""
        reached, release = self.rig.engine.hold(held_at)
        self.committing = asyncio.create_task(self.rig.commit("two", 2, inflight))
        await reached.wait()
        num_before = len(self.rig.engine.requests)
        self.late = asyncio.create_task(_generate(self.generation, self.rig, "late"))
        await self.rig.engine.until_requests(num_before + 1)
        if inflight is not InflightMode.WAIT:
            self.rig.engine.step(10)
        release.set()

    async def finish(self, num_aborted: int = 0) -> tuple[Completion, Completion]:
        """Step everything to its end; answers both completions."""
        committed = await self.committing
        assert (committed.policy_version, committed.num_aborted) == (2, num_aborted)
        self.rig.engine.step(64)
        async with asyncio.timeout(5):
            return await self.early, await self.late


async def _late_is_right(late: Completion) -> None:
    assert (late.finish_reason, _versions(late)) == (FinishReason.LENGTH, [(2, 0, 64)])
    assert set(late.rollout_logprobs.tolist()) == {-2.0}


async def test_keep_goes_on_with_the_new_weights_and_tags_every_token(rig: SinkRig) -> None:
    scene = _Scene(rig)
    await scene.open()
    await scene.commit_while_one_arrives(InflightMode.KEEP, held_at="shoal_commit")
    early, late = await scene.finish()
    assert (early.finish_reason, _versions(early)) == (FinishReason.LENGTH, [(1, 0, 30), (2, 30, 64)])
    assert early.rollout_logprobs.tolist() == [-1.0] * 30 + [-2.0] * 34
    await _late_is_right(late)


async def test_abort_answers_running_requests_with_what_they_have(rig: SinkRig) -> None:
    scene = _Scene(rig)
    await scene.open()
    await scene.commit_while_one_arrives(InflightMode.ABORT, held_at="shoal_commit")
    early, late = await scene.finish(num_aborted=1)
    assert (early.finish_reason, _versions(early)) == (FinishReason.ABORT, [(1, 0, 30)])
    assert early.rollout_logprobs.tolist() == [-1.0] * 30
    await _late_is_right(late)


async def test_wait_lets_running_requests_end_on_the_old_weights(rig: SinkRig) -> None:
    scene = _Scene(rig)
    await scene.open()
    await scene.commit_while_one_arrives(InflightMode.WAIT, held_at="pause wait")
    rig.engine.step(10)
    await asyncio.sleep(0)
    assert rig.sink.state is SinkState.COMMITTING
    assert "shoal_commit" not in rig.engine.calls[-1:]
    rig.engine.step(24)
    early, late = await scene.finish()
    assert (early.finish_reason, _versions(early)) == (FinishReason.LENGTH, [(1, 0, 64)])
    assert set(early.rollout_logprobs.tolist()) == {-1.0}
    await _late_is_right(late)


async def test_a_wait_that_lasts_too_long_is_refused_and_changes_nothing(rig: SinkRig) -> None:
    scene = _Scene(rig)
    await scene.open()
    with pytest.raises(StateError, match="did not end"):
        await rig.sink.commit("two", 2, InflightMode.WAIT, 1.2)
    assert (rig.sink.state, rig.sink.served_version, rig.live()["a"], rig.committed) == (SinkState.VERIFIED, 1, -1.0, [1])
    late = asyncio.create_task(_generate(scene.generation, rig, "late"))
    await rig.engine.until_requests(2)
    rig.engine.step(64)
    early = await scene.early
    assert (early.finish_reason, _versions(early)) == (FinishReason.LENGTH, [(1, 0, 64)])
    assert _versions(await late) == [(1, 0, 64)]
    # Nothing runs any more, so the same push goes through now.
    assert (await rig.commit("two", 2, InflightMode.WAIT)).policy_version == 2
    assert rig.failed == []


async def test_a_caller_without_time_to_wait_is_refused_at_once_if_something_runs(rig: SinkRig) -> None:
    scene = _Scene(rig)
    await scene.open()
    with pytest.raises(StateError, match="did not end"):
        await rig.sink.commit("two", 2, InflightMode.WAIT, 0.1)
    assert rig.engine.paused is None
    rig.engine.step(34)
    await scene.early


async def test_a_commit_outlives_its_caller_and_a_repeat_waits_for_it(rig: SinkRig) -> None:
    plan_hash = await rig.to_verified()
    reached, release = rig.engine.hold("shoal_commit")
    caller = asyncio.create_task(rig.commit())
    await reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    repeat = asyncio.create_task(rig.commit())
    for refused in (
        rig.sink.abort("a"),
        rig.to_prepared("b", 2),
        rig.sink.verify("a", 1, plan_hash, ()),
        rig.sink.digest(0, plan_hash),
    ):
        with pytest.raises(StateError):
            await refused
    release.set()
    assert (await repeat).policy_version == 1
    assert rig.engine.calls[-5:] == [*COMMIT_CALLS, "shoal_free"]


async def test_a_commit_repeats_while_the_old_weights_are_being_freed(rig: SinkRig) -> None:
    await rig.to_verified()
    reached, release = rig.engine.hold("shoal_free")
    first = asyncio.create_task(rig.commit())
    await reached.wait()
    repeat = asyncio.create_task(rig.commit())
    release.set()
    assert await repeat == await first


async def test_old_weights_that_cannot_be_freed_do_not_undo_a_commit(rig: SinkRig) -> None:
    await rig.to_verified()
    rig.engine.failures["shoal_free"] = StateError("old weights are stuck")
    assert (await rig.commit()).policy_version == 1
    assert (rig.sink.state, rig.failed) == (SinkState.COMMITTED, [])


@pytest.mark.parametrize("call", COMMIT_CALLS)
async def test_a_commit_that_fails_half_way_ends_serving(rig: SinkRig, call: str) -> None:
    await rig.to_verified()
    rig.engine.failures[call] = RuntimeError("worker died")
    with pytest.raises(InternalError, match="stopped serving: worker died"):
        await rig.commit()
    assert rig.sink.state is SinkState.FAILED
    assert len(rig.failed) == 1
    if call != "resume":
        assert "resume" not in rig.engine.calls
    # A coordinator asks again: it must hear the reason, and nothing may be tried again.
    num_calls = len(rig.engine.calls)
    with pytest.raises(InternalError, match="stopped serving: worker died"):
        await rig.commit()
    assert len(rig.engine.calls) == num_calls
    for refused in (rig.to_prepared("b", 2), rig.commit("b", 2), rig.sink.abort("a"), rig.sink.digest(0, "hash")):
        with pytest.raises(StateError):
            await refused
