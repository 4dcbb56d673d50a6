"""Generate calls over a scripted engine.

Invariants: each completion is handed out as soon as it is done; whoever leaves early leaves nothing running in the engine; a draining
server takes nothing new and ends once the running samples have.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from shoal_rollout.engine_seed import engine_seed
from shoal_rollout.generation import Generation
from shoal_rollout.request_checks import GenerateCall

from shoal.errors import InternalError, InvalidRequestError, UnavailableError
from shoal.telemetry.metrics import sample_value
from shoal.types import Completion, FinishReason, SamplingParams
from tests.helpers.engine_fakes import FakeSampler

CALL = GenerateCall(request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_new_tokens=4, stop_token_ids=(9,)), num_samples=3)


@pytest.fixture
def sampler() -> FakeSampler:
    return FakeSampler()


@pytest.fixture
def generation(sampler: FakeSampler) -> Generation:
    return Generation(sampler, engine_id="rollout-0", vocab_size=101, max_model_len=32, eos_ids=(2, 3))


async def _collect(generation: Generation, call: GenerateCall) -> list[Completion]:
    return [completion async for completion in generation.generate(call)]


async def test_generate_streams_each_completion_when_it_is_done(sampler: FakeSampler, generation: Generation) -> None:
    stream = generation.generate(CALL)
    first = asyncio.ensure_future(anext(stream))
    ids = await sampler.until_running(3)
    sampler.finish(ids[2])
    assert (await first).sample_index == 2
    assert len(sampler.running) == 2
    sampler.finish(ids[0], reason="length")
    second = await anext(stream)
    assert (second.sample_index, second.finish_reason, second.engine_id) == (0, FinishReason.LENGTH, "rollout-0")
    sampler.finish(ids[1])
    assert [completion.sample_index async for completion in stream] == [1]
    assert generation.num_running == 0


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, (2, 3, 9)), (True, (9,))])
async def test_generate_gives_each_sample_its_seed_and_stop_ids(
    sampler: FakeSampler, generation: Generation, ignore_eos: bool, stop_ids: tuple[int, ...]
) -> None:
    call = replace(CALL, seeds=(7, 8, 9), sampling=replace(CALL.sampling, ignore_eos=ignore_eos))
    task = asyncio.create_task(_collect(generation, call))
    ids = await sampler.until_running(3)
    assert [sampler.running[sample_id].params for sample_id in ids] == [(call.sampling, stop_ids, seed) for seed in (7, 8, 9)]
    for sample_id in ids:
        sampler.finish(sample_id)
    assert len(await task) == 3


async def test_generate_that_is_cancelled_leaves_nothing_in_the_engine(sampler: FakeSampler, generation: Generation) -> None:
    task = asyncio.create_task(_collect(generation, CALL))
    ids = await sampler.until_running(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(sampler.cancelled) == ids
    assert not sampler.running
    assert generation.num_running == 0


async def test_generate_that_fails_cancels_the_other_samples(sampler: FakeSampler, generation: Generation) -> None:
    task = asyncio.create_task(_collect(generation, CALL))
    ids = await sampler.until_running(3)
    sampler.running[ids[1]].answer.set_exception(InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await task
    assert sorted(sampler.cancelled) == [ids[0], ids[2]]


async def test_abort_answers_with_partial_tokens_and_ignores_unknown_ids(sampler: FakeSampler, generation: Generation) -> None:
    task = asyncio.create_task(_collect(generation, CALL))
    await sampler.until_running(3)
    assert await generation.abort(["r", "unknown"]) == 3
    completions = await task
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
    assert all(len(completion.response_ids) == 1 for completion in completions)
    assert await generation.abort(["r"]) == 0


async def test_drain_waits_for_running_samples_and_refuses_new_ones(sampler: FakeSampler, generation: Generation) -> None:
    task = asyncio.create_task(_collect(generation, CALL))
    ids = await sampler.until_running(3)
    draining = asyncio.create_task(generation.drain())
    await asyncio.sleep(0)
    assert generation.is_draining
    with pytest.raises(UnavailableError, match="draining"):
        await _collect(generation, replace(CALL, request_id="late"))
    assert not draining.done()
    for sample_id in ids:
        sampler.finish(sample_id)
    await asyncio.wait_for(draining, 5)
    assert len(await task) == 3


async def test_generate_refuses_a_stale_server_and_a_repeated_id(sampler: FakeSampler, generation: Generation) -> None:
    generation.policy_version = 4
    with pytest.raises(UnavailableError, match="serves policy version 4, the request wants at least 5"):
        await _collect(generation, replace(CALL, min_policy_version=5))
    with pytest.raises(InvalidRequestError, match=r"prompt_ids\[0\] is 101"):
        await _collect(generation, replace(CALL, prompt_ids=[101]))
    task = asyncio.create_task(_collect(generation, replace(CALL, min_policy_version=4)))
    await sampler.until_running(3)
    with pytest.raises(InvalidRequestError, match="'r' is running already"):
        await _collect(generation, CALL)
    await generation.abort_all()
    await task


async def test_a_sample_without_finite_logprobs_is_dropped_and_counted(sampler: FakeSampler, generation: Generation) -> None:
    name = "shoal_rollout_non_finite_samples_count_total"
    before = sample_value(name) or 0.0
    task = asyncio.create_task(_collect(generation, replace(CALL, num_samples=1)))
    (sample_id,) = await sampler.until_running(1)
    sampler.finish(sample_id, logprob=math.nan)
    (completion,) = await task
    assert completion.finish_reason is not FinishReason.ABORT
    assert len(completion.response_ids) == 0
    assert sample_value(name) == before + 1


def test_engine_seeds_differ_between_servers_and_repeat_for_one() -> None:
    seeds = {engine_seed(run_seed, f"rollout-{index}") for run_seed in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert engine_seed(3, "rollout-1") == engine_seed(3, "rollout-1")


async def test_a_server_below_the_required_version_answers_nothing(sampler: FakeSampler, generation: Generation) -> None:
    generation.require(50)
    # A coordinator that restarted may ask for less; a server that has heard of version 50 knows better.
    generation.require(3)
    for version in (0, 49):
        generation.policy_version = version
        with pytest.raises(UnavailableError, match=f"serves policy version {version}, the run requires at least 50"):
            await _collect(generation, CALL)
    assert not sampler.running
    generation.policy_version = 50
    task = asyncio.create_task(_collect(generation, CALL))
    for sample_id in await sampler.until_running(3):
        sampler.finish(sample_id)
    assert len(await task) == 3


async def test_a_server_that_joins_a_run_answers_nothing_before_it_was_told_the_version(sampler: FakeSampler) -> None:
    generation = Generation(sampler, engine_id="rollout-1", vocab_size=101, max_model_len=32, eos_ids=(2,), required_policy_version=None)
    with pytest.raises(UnavailableError, match="has not been told yet which policy version"):
        await _collect(generation, CALL)
    generation.require(0)
    task = asyncio.create_task(_collect(generation, CALL))
    for sample_id in await sampler.until_running(3):
        sampler.finish(sample_id)
    assert len(await task) == 3
