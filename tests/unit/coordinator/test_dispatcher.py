"""Dispatch: load, retries, seeds, what is refused; all with fakes and events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from shoal_coordinator.dispatcher import Dispatcher, GeneratedGroup, GenerationRequest, RolloutEndpoint, sample_seed, training_request
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RolloutSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, ShoalError, StalePolicyError, StateError, UnavailableError
from shoal.types import Completion, FinishReason, PolicyVersionSpan
from tests.helpers.coordinator_fakes import VOCAB_SIZE, FakeRollout, make_completion, make_request, make_task, rollout_pool, sampled_ids


def make_dispatcher(pool: ServerPool[RolloutEndpoint], *, retries: int = 2, wait_s: float = 5.0, max_groups: int = 64) -> Dispatcher:
    return Dispatcher(
        pool,
        RolloutSection(retries=retries, request_timeout_s=5.0),
        run_id="run",
        vocab_size=VOCAB_SIZE,
        clock=StageClock(),
        wait_for_server_s=wait_s,
        max_concurrent_groups=max_groups,
    )


async def generate_all(dispatcher: Dispatcher, tasks: Sequence[PromptTask], request: GenerationRequest) -> dict[str, GeneratedGroup]:
    groups: dict[str, GeneratedGroup] = {}
    async with aclosing(dispatcher.generate(tasks, request)) as finished:
        async for some in finished:
            groups |= {group.task.uid: group for group in some}
    return groups


async def generate_one(dispatcher: Dispatcher, request: GenerationRequest | None = None) -> GeneratedGroup:
    return (await generate_all(dispatcher, [make_task()], request or make_request()))["e0-i0"]


async def test_dispatcher_returns_exactly_what_was_sampled() -> None:
    server = FakeRollout(script=lambda _, completions: completions[::-1])
    group = await generate_one(make_dispatcher(rollout_pool(a=server)), make_request(3))
    seeds = [sample_seed(7, "e0-i0", index, 0) for index in range(3)]
    assert server.requests == [("run/e0-i0/0", tuple(seeds))]
    assert [completion.response_ids.tolist() for completion in group.completions] == [sampled_ids(seed) for seed in seeds]
    assert (group.server_id, group.attempt, group.num_empty, group.num_missing) == ("a", 0, 0, 0)


async def test_samples_do_not_depend_on_the_server_and_differ_from_each_other() -> None:
    tasks = [make_task(f"e0-i{index}") for index in range(6)]
    one = await generate_all(make_dispatcher(rollout_pool(a=FakeRollout())), tasks, make_request())
    two = await generate_all(make_dispatcher(rollout_pool(b=FakeRollout(), c=FakeRollout())), tasks, make_request())
    for uid, group in one.items():
        for mine, other in zip(group.completions, two[uid].completions, strict=True):
            np.testing.assert_array_equal(mine.response_ids, other.response_ids)
    seeds = {sample_seed(7, task.uid, index, attempt) for task in tasks for index in range(4) for attempt in range(3)}
    assert len(seeds) == 6 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_replicas_that_get_the_same_prompt_answer_differently_and_explicit_seeds_answer_alike() -> None:
    """R34: the same prompt is issued twice, once to each of two servers; then everything again."""
    answers = []
    for _ in range(2):
        servers = {"a": FakeRollout(), "b": FakeRollout()}
        groups = await generate_all(make_dispatcher(rollout_pool(**servers)), [make_task("e0-i0"), make_task("e1-i0")], make_request(4))
        assert {group.server_id for group in groups.values()} == {"a", "b"}
        answers.append({uid: [completion.response_ids.tolist() for completion in group.completions] for uid, group in groups.items()})
    assert answers[0] == answers[1]
    assert not [ids for ids in answers[0]["e0-i0"] if len(ids) > 1 and ids in answers[0]["e1-i0"]]
    seeds = [seed for server in servers.values() for _, own in server.requests for seed in own]
    assert len(set(seeds)) == 8


async def test_groups_go_to_the_server_with_the_least_outstanding_tokens() -> None:
    gate = asyncio.Event()
    a, b = FakeRollout(gate=gate), FakeRollout(gate=gate)
    dispatcher = make_dispatcher(rollout_pool(a=a, b=b))
    # 100 + 8 tokens outstanding on a: the three small ones (11 each) all fit on b before a is chosen again.
    tasks = [make_task("long", 100), *[make_task(f"short{index}") for index in range(3)]]
    running = asyncio.create_task(generate_all(dispatcher, tasks, make_request()))
    await b.entered.wait()
    gate.set()
    groups = await running
    assert {uid: group.server_id for uid, group in groups.items()} == {"long": "a", "short0": "b", "short1": "b", "short2": "b"}


async def test_all_groups_of_a_step_run_at_once_up_to_the_bound() -> None:
    gate = asyncio.Event()
    server = FakeRollout(gate=gate)
    dispatcher = make_dispatcher(rollout_pool(a=server), max_groups=3)
    running = asyncio.create_task(generate_all(dispatcher, [make_task(f"g{index}") for index in range(5)], make_request()))
    for _ in range(50):
        await asyncio.sleep(0)
    assert server.num_open == 3
    gate.set()
    assert len(await running) == 5


@pytest.mark.parametrize("error", [UnavailableError("down"), DeadlineError("late"), StateError("old policy"), InternalError("broken")])
async def test_failed_group_is_generated_again_on_another_server_with_new_seeds(error: ShoalError) -> None:
    bad, good = FakeRollout(fail_after=(1, error)), FakeRollout()
    group = await generate_one(make_dispatcher(rollout_pool(a=bad, b=good)))
    assert (group.server_id, group.attempt, len(group.completions)) == ("b", 1, 2)
    assert good.requests == [("run/e0-i0/1", tuple(sample_seed(7, "e0-i0", index, 1) for index in range(2)))]


async def test_retries_are_bounded_and_the_error_names_the_servers() -> None:
    server = FakeRollout(fail_after=(0, UnavailableError("down")))
    pool = rollout_pool(a=server, b=server, c=server)
    with pytest.raises(UnavailableError, match=r"'e0-i0' failed on a, b; last: down"):
        await generate_one(make_dispatcher(pool, retries=1))
    assert len(server.requests) == 2


async def test_refused_request_is_not_retried() -> None:
    server = FakeRollout(fail_after=(0, InvalidRequestError("prompt too long")))
    with pytest.raises(InvalidRequestError, match="too long"):
        await generate_one(make_dispatcher(rollout_pool(a=server, b=server)))
    assert len(server.requests) == 1


async def test_failure_for_good_cancels_the_other_groups() -> None:
    waits = FakeRollout(gate=asyncio.Event())
    fails = FakeRollout(fail_after=(0, InvalidRequestError("no")))
    dispatcher = make_dispatcher(rollout_pool(a=waits, b=fails))
    with pytest.raises(InvalidRequestError):
        await generate_all(dispatcher, [make_task("x"), make_task("y")], make_request())
    assert (waits.num_open, waits.num_cancelled) == (0, 1)


async def test_leaving_early_cancels_what_runs() -> None:
    server = FakeRollout(gate=asyncio.Event())
    running = asyncio.create_task(generate_one(make_dispatcher(rollout_pool(a=server))))
    await server.entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (server.num_open, server.num_cancelled) == (0, 1)


async def test_removed_server_loses_its_group_at_once() -> None:
    stuck, good = FakeRollout(gate=asyncio.Event()), FakeRollout()
    pool = rollout_pool(a=stuck)
    running = asyncio.create_task(generate_one(make_dispatcher(pool)))
    await stuck.entered.wait()
    pool.remove("a")
    pool.add("b", good)
    group = await running
    assert (group.server_id, group.attempt, stuck.num_cancelled) == ("b", 1, 1)


async def test_without_servers_the_wait_is_bounded_and_says_for_what() -> None:
    with pytest.raises(UnavailableError, match="no rollout server"):
        await generate_one(make_dispatcher(rollout_pool(), wait_s=0.02))


async def test_late_server_gets_the_waiting_group() -> None:
    pool = rollout_pool()
    running = asyncio.create_task(generate_one(make_dispatcher(pool)))
    await asyncio.sleep(0)
    pool.add("late", FakeRollout())
    assert (await running).server_id == "late"


async def test_after_the_last_timeout_the_finished_samples_are_used() -> None:
    server = FakeRollout(fail_after=(2, DeadlineError("stuck")))
    group = await generate_one(make_dispatcher(rollout_pool(a=server), retries=0), make_request(4))
    assert [completion.sample_index for completion in group.completions] == [0, 1]
    assert group.num_missing == 2


async def test_group_without_a_finished_sample_is_returned_empty() -> None:
    server = FakeRollout(fail_after=(0, DeadlineError("stuck")))
    group = await generate_one(make_dispatcher(rollout_pool(a=server), retries=0))
    assert (group.completions, group.num_missing) == ((), 2)


async def test_completions_without_tokens_are_excluded_and_counted() -> None:
    server = FakeRollout(script=lambda _, completions: [make_completion(0, []), completions[1]])
    group = await generate_one(make_dispatcher(rollout_pool(a=server)))
    assert [completion.sample_index for completion in group.completions] == [1]
    assert (group.num_empty, group.num_missing) == (1, 0)


def _with(index: int, replacement: Completion | None) -> FakeRollout:
    def script(_: str, completions: list[Completion]) -> list[Completion]:
        return [*completions[:index], *([] if replacement is None else [replacement]), *completions[index + 1 :]]

    return FakeRollout(script=script)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (None, "1 of 2 completions"),
        (make_completion(0, [1]), "one twice"),
        (replace(make_completion(1, [1, 2]), rollout_logprobs=np.zeros(1, np.float32)), "log-probabilities than of tokens"),
        (make_completion(1, [1], finish_reason=FinishReason.ABORT), "was aborted 17 times"),
    ],
)
async def test_answer_that_no_engine_samples_is_refused_and_retried_elsewhere(answer: Completion | None, match: str) -> None:
    with pytest.raises(ShoalError, match=match):
        await generate_one(make_dispatcher(rollout_pool(a=_with(1, answer)), retries=0))
    group = await generate_one(make_dispatcher(rollout_pool(a=_with(1, answer), b=FakeRollout())))
    assert (group.server_id, len(group.completions)) == ("b", 2)


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (make_completion(1, [1, VOCAB_SIZE]), (1, 0)),
        (make_completion(1, [-1]), (1, 0)),
        (replace(make_completion(1, [1]), rollout_logprobs=np.array([np.nan], np.float32)), (0, 1)),
        (replace(make_completion(1, [1, 2]), rollout_logprobs=np.array([-1, -np.inf], np.float32)), (0, 1)),
    ],
)
async def test_sample_that_cannot_be_trained_on_is_dropped_and_counted(answer: Completion, counts: tuple[int, int]) -> None:
    group = await generate_one(make_dispatcher(rollout_pool(a=_with(1, answer)), retries=0), make_request(3))
    assert [completion.sample_index for completion in group.completions] == [0, 2]
    assert (group.num_outside_vocab, group.num_not_finite) == counts
    assert (group.attempt, group.num_missing, group.num_empty) == (0, 0, 0)


def aborting(num_times: int) -> FakeRollout:
    """Ends the second sample early in its first attempts, as a weight push may."""

    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        if int(request_id.rpartition("/")[2]) >= num_times:
            return completions
        return [completions[0], make_completion(1, [1, 2], finish_reason=FinishReason.ABORT)]

    return FakeRollout(script=script)


async def test_group_with_an_aborted_sample_is_generated_again_and_counted() -> None:
    server = aborting(3)
    group = await generate_one(make_dispatcher(rollout_pool(a=server), retries=0))
    assert (group.attempt, group.num_aborted, group.num_missing) == (3, 3, 0)
    assert [completion.finish_reason for completion in group.completions] == [FinishReason.STOP, FinishReason.STOP]
    assert len({seeds for _, seeds in server.requests}) == 4, "every attempt has seeds of its own"


async def test_aborted_sample_goes_to_another_server_at_once() -> None:
    group = await generate_one(make_dispatcher(rollout_pool(a=aborting(99), b=FakeRollout()), retries=0))
    assert (group.server_id, group.num_aborted) == ("b", 1)


async def test_aborted_sample_does_not_count_as_finished_when_the_rest_timed_out() -> None:
    aborted = make_completion(1, [1], finish_reason=FinishReason.ABORT)
    server = FakeRollout(script=lambda _, completions: [completions[0], aborted, *completions[2:]], fail_after=(2, DeadlineError("stuck")))
    group = await generate_one(make_dispatcher(rollout_pool(a=server), retries=0), make_request(3))
    assert [completion.sample_index for completion in group.completions] == [0]
    assert group.num_missing == 2


async def test_tokens_of_an_older_policy_are_refused_and_generated_elsewhere() -> None:
    request = make_request(min_policy_version=50)
    with pytest.raises(StalePolicyError, match="tokens of policy version 0, but at least version 50"):
        await generate_one(make_dispatcher(rollout_pool(a=FakeRollout(policy_version=0)), retries=0), request)
    pool = rollout_pool(a=FakeRollout(policy_version=0), b=FakeRollout(policy_version=50))
    assert (await generate_one(make_dispatcher(pool), request)).server_id == "b"


async def test_tokens_partly_of_an_older_policy_are_refused() -> None:
    spans = (PolicyVersionSpan(policy_version=49, start=0, end=1), PolicyVersionSpan(policy_version=50, start=1, end=2))
    mixed = replace(make_completion(1, [1, 2]), policy_version_spans=spans)
    server = FakeRollout(script=lambda _, completions: [completions[0], mixed], policy_version=50)
    with pytest.raises(StalePolicyError, match="version 49"):
        await generate_one(make_dispatcher(rollout_pool(a=server), retries=0), make_request(min_policy_version=50))


async def test_greedy_request_sends_no_seeds() -> None:
    server = FakeRollout()
    await generate_one(make_dispatcher(rollout_pool(a=server)), make_request(1, seed=None))
    assert server.requests == [("run/e0-i0/0", ())]


def test_training_request_has_no_stop_ids_when_eos_is_ignored() -> None:
    for ignore_eos, expected in ((False, (2, 5)), (True, ())):
        config = RolloutSection(ignore_eos=ignore_eos, max_new_tokens=4)
        sampling = training_request(config, seed=0, stop_token_ids=(2, 5), min_policy_version=0).sampling
        assert (sampling.ignore_eos, sampling.stop_token_ids) == (ignore_eos, expected)
