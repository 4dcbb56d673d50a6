"""One real server over real gRPC: sampling, refusals, aborts, a push under running requests, and an orderly end.

The tests share the server; the last one ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient
from shoal.config.models import PushSection
from shoal.errors import InvalidRequestError, StateError, UnavailableError
from shoal.rpc.health import is_serving
from shoal.types import Completion, FinishReason, InflightMode, SamplingParams
from tests.helpers.padded_models import make_padding_loud
from tests.helpers.push_trainer import PushTrainer
from tests.helpers.rollout_process import SECURITY, RolloutProcess, start_rollout, until_running
from tests.helpers.tiny_models import (
    EOS_ID,
    VOCAB_SIZE,
    perturbed_tensors,
    reference_choices,
    reference_logprobs,
    save_tiny_model,
    save_variant,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7, 90, 100]
"""With an id that no tokenizer gives but the model has: no engine may stumble over it."""
NUM_KNOWN = 97
SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=150, ignore_eos=True)
TIMEOUT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "model", "qwen2", tied=True)
    make_padding_loud(folder, NUM_KNOWN)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[RolloutProcess]:
    process = await start_rollout(tmp_path_factory.mktemp("server"), model)
    yield process
    process.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(server.address, SECURITY) as opened:
        yield opened


async def _sample(
    client: RolloutClient,
    sampling: SamplingParams = SAMPLING,
    *,
    name: str = "r",
    prompt: list[int] = PROMPT,
    seeds: tuple[int, ...] = (1, 2),
) -> list[Completion]:
    stream = client.generate(name, prompt, sampling, max(len(seeds), 1), seeds, timeout_s=TIMEOUT_S)
    return sorted([completion async for completion in stream], key=lambda completion: completion.sample_index)


async def test_describe_tells_the_facts(client: RolloutClient, model: Path) -> None:
    description = await client.describe(timeout_s=5)
    assert (description.service_id, description.model) == ("rollout-0", str(model))
    assert (description.vocab_size, description.max_model_len, description.weight_dtype) == (VOCAB_SIZE, 200, "float32")
    assert (description.policy_version, description.num_running, description.draining) == (0, 0, False)


async def test_generate_answers_ids_with_the_models_logprobs(client: RolloutClient, model: Path) -> None:
    for temperature in (1.0, 0.7):
        for completion in await _sample(client, replace(SAMPLING, temperature=temperature)):
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.response_ids) == 16
            assert completion.response_ids.max() < NUM_KNOWN
            expected = reference_logprobs(model, PROMPT, completion.response_ids.tolist(), temperature=temperature)
            np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)


async def test_evaluation_settings_narrow_what_is_sampled(client: RolloutClient, model: Path) -> None:
    (greedy,) = await _sample(client, replace(SAMPLING, temperature=0.0), seeds=(1,))
    ids = greedy.response_ids.tolist()
    assert ids == reference_choices(model, PROMPT, ids)
    np.testing.assert_allclose(greedy.rollout_logprobs, reference_logprobs(model, PROMPT, ids), atol=1e-4, err_msg="untempered values")
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        (single,) = await _sample(client, replace(SAMPLING, **narrow), seeds=(1,))
        assert single.response_ids.tolist() == ids
        np.testing.assert_allclose(single.rollout_logprobs, 0.0, atol=1e-6, err_msg="of what is left, only one")
    for wide in ({"top_k": 3}, {"top_p": 0.8}):
        for completion in await _sample(client, replace(SAMPLING, **wide)):
            plain = reference_logprobs(model, PROMPT, completion.response_ids.tolist())
            # Renormalised over what is left: why training refuses these settings.
            assert (completion.rollout_logprobs >= plain - 1e-4).all()
            assert (completion.rollout_logprobs > plain + 1e-3).any()


async def test_seeds_repeat_and_no_seeds_differ(client: RolloutClient) -> None:
    first, again = await _sample(client), await _sample(client)
    assert [c.response_ids.tolist() for c in first] == [c.response_ids.tolist() for c in again]
    assert first[0].response_ids.tolist() != first[1].response_ids.tolist()
    stream = client.generate("unseeded", PROMPT, SAMPLING, 4, timeout_s=TIMEOUT_S)
    assert len({tuple(completion.response_ids.tolist()) async for completion in stream}) == 4


async def test_stop_ids_eos_and_lengths_end_a_response(client: RolloutClient, model: Path) -> None:
    (whole,) = await _sample(client, seeds=(1,))
    ids = whole.response_ids.tolist()
    # Ids that come for the first time, late enough.
    early, late = [token for place, token in enumerate(ids) if place >= 4 and token not in ids[:place]][:2]
    stops = (*({*range(NUM_KNOWN)} - {*ids}), late, early, VOCAB_SIZE - 1)
    (stopped,) = await _sample(client, replace(SAMPLING, stop_token_ids=stops), seeds=(1,))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.response_ids.tolist() == ids[: ids.index(early) + 1]
    np.testing.assert_allclose(stopped.rollout_logprobs, whole.rollout_logprobs[: len(stopped.response_ids)], atol=1e-5)

    shortest = ids.index(early) + 2
    (longer,) = await _sample(client, replace(SAMPLING, stop_token_ids=(early,), min_new_tokens=shortest), seeds=(1,))
    assert len(longer.response_ids) >= shortest
    assert early not in longer.response_ids[:shortest]
    plain = reference_logprobs(model, PROMPT, longer.response_ids.tolist())
    assert (longer.rollout_logprobs[:shortest] >= plain[:shortest] - 1e-4).all()
    assert (longer.rollout_logprobs[:shortest] > plain[:shortest] + 1e-4).any(), "renormalised while nothing may end"
    np.testing.assert_allclose(longer.rollout_logprobs[shortest:], plain[shortest:], atol=1e-4)


async def test_eos_ends_a_response_unless_it_is_cut(client: RolloutClient) -> None:
    ends = await _sample(client, replace(SAMPLING, max_new_tokens=100, ignore_eos=False), seeds=tuple(range(8)))
    for completion in ends:
        is_eos = completion.response_ids[-1] == EOS_ID
        assert completion.finish_reason is (FinishReason.STOP if is_eos else FinishReason.LENGTH)
        assert EOS_ID not in completion.response_ids[:-1]
    assert any(completion.finish_reason is FinishReason.STOP for completion in ends)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt_ids is empty"), ([1, VOCAB_SIZE], "is 101"), ([-1], "is -1"), ([1] * 190, "above max_model_len 200")],
    ids=["empty", "outside", "negative", "long"],
)
async def test_prompts_that_would_kill_the_engine_are_refused(client: RolloutClient, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await _sample(client, prompt=prompt)
    assert len(await _sample(client)) == 2


async def test_a_stale_server_refuses(client: RolloutClient) -> None:
    with pytest.raises(UnavailableError, match="serves policy version 0, the request wants at least 7"):
        async for _ in client.generate("stale", PROMPT, SAMPLING, 1, min_policy_version=7, timeout_s=TIMEOUT_S):
            pass


async def test_leaving_a_stream_aborts_its_samples(client: RolloutClient) -> None:
    short = asyncio.create_task(_sample(client, name="left", sampling=LONG, seeds=tuple(range(16))))
    await until_running(client, 16)
    short.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await short
    await until_running(client, 0, at_most=True)


async def test_abort_answers_with_partial_tokens(client: RolloutClient) -> None:
    running = asyncio.create_task(_sample(client, name="long", sampling=LONG, seeds=tuple(range(4))))
    await until_running(client, 4)
    assert await client.abort(["long", "unknown"], timeout_s=5) == 4
    completions = await running
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
    assert all(len(completion.response_ids) < 150 for completion in completions)


class _Pusher:
    """Pushes versions of the model, and keeps each as a folder to compare with."""

    def __init__(self, server: RolloutProcess, sink: WeightSinkClient, model: Path, folder: Path) -> None:
        self.sink = sink
        self.folders = [model]
        self.plan_hash = ""
        self._folder = folder
        self.trainer = PushTrainer(perturbed_tensors(model, seed=0), PushSection(shm_dir=str(server.shm_dir)))

    async def to_verified(self, version: int) -> None:
        """Everything but the commit."""
        tensors = perturbed_tensors(self.folders[0], seed=version)
        self.folders.append(save_variant(self.folders[0], self._folder / f"v{version}", tensors))
        for name, tensor in tensors.items():
            self.trainer.tensors[name].copy_(torch.from_numpy(tensor))
        prepared = await self.sink.prepare(f"push-{version}", version, 120.0, timeout_s=10)
        assert prepared.served_version == version - 1
        self.layout = prepared.layout
        self.plan_hash = self.trainer.plan(prepared.layout).plan_hash
        await self.sink.plan(f"push-{version}", version, self.plan_hash, self.trainer.layout, timeout_s=10)
        pairs = await asyncio.to_thread(self.trainer.write, prepared.layout, push_id=f"push-{version}", version=version)
        verified = await self.sink.verify(f"push-{version}", version, self.plan_hash, pairs, timeout_s=20)
        assert verified.num_bytes == sum(tensor.nbytes for tensor in tensors.values())

    async def until_committing(self) -> None:
        """Wait until a commit has begun, which an audit of another version is refused with; no work is done for that."""
        async with asyncio.timeout(10):
            while True:
                with pytest.raises(StateError) as refused:
                    await self.sink.digest(99, "", timeout_s=5)
                if "a push is committing" in str(refused.value) or "a push is committed" in str(refused.value):
                    return

    def check(self, completion: Completion, versions: list[int]) -> None:
        """Compare versions and log-probabilities of a completion."""
        assert [span.policy_version for span in completion.policy_version_spans] == versions
        ids = completion.response_ids.tolist()
        for span in completion.policy_version_spans:
            expected = reference_logprobs(self.folders[span.policy_version], PROMPT, ids)
            part = slice(span.start, span.end)
            np.testing.assert_allclose(completion.rollout_logprobs[part], expected[part], atol=1e-4)


async def _begin_long(client: RolloutClient, name: str) -> asyncio.Task[list[Completion]]:
    """Let the engine begin eight long samples; it takes requests in order, so that a later one's token tells."""
    running = asyncio.create_task(_sample(client, name=name, sampling=LONG, seeds=tuple(range(8))))
    await until_running(client, 8)
    await _sample(client, SamplingParams(max_new_tokens=1), name=f"after {name}", seeds=(1,))
    return running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pusher(server: RolloutProcess, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[_Pusher]:
    async with WeightSinkClient(server.address, SECURITY) as sink:
        opened = _Pusher(server, sink, model, tmp_path_factory.mktemp("versions"))
        yield opened
        opened.trainer.close()


async def test_a_push_that_keeps_running_requests_tags_every_token_with_its_version(client: RolloutClient, pusher: _Pusher) -> None:
    during = await _begin_long(client, "during the push")
    await pusher.to_verified(1)
    across = await _begin_long(client, "across the commit")
    committed = await pusher.sink.commit("push-1", 1, InflightMode.KEEP, timeout_s=20)
    assert committed.policy_version == 1
    assert (await client.describe(timeout_s=5)).policy_version == 1
    for completion in await across:
        assert completion.finish_reason is FinishReason.LENGTH
        pusher.check(completion, [0, 1])
    for completion in await during:
        pusher.check(completion, [0, 1] if len(completion.policy_version_spans) == 2 else [0])
    for completion in await _sample(client):
        pusher.check(completion, [1])


async def test_a_push_that_waits_lets_running_requests_end_on_the_old_version(client: RolloutClient, pusher: _Pusher) -> None:
    await pusher.to_verified(2)
    running = await _begin_long(client, "waited for")
    committing = asyncio.create_task(pusher.sink.commit("push-2", 2, InflightMode.WAIT, timeout_s=30))
    await pusher.until_committing()
    late = asyncio.create_task(_sample(client, name="late"))
    assert (await committing).policy_version == 2
    for completion in await running:
        assert completion.finish_reason is FinishReason.LENGTH
        pusher.check(completion, [1])
    for completion in await late:
        pusher.check(completion, [2])


async def test_a_push_that_aborts_answers_running_requests_with_what_they_have(client: RolloutClient, pusher: _Pusher) -> None:
    await pusher.to_verified(3)
    running = await _begin_long(client, "cut")
    committed = await pusher.sink.commit("push-3", 3, InflightMode.ABORT, timeout_s=20)
    assert committed.num_aborted == 8
    for completion in await running:
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.response_ids) < 150
        pusher.check(completion, [2])
    for completion in await _sample(client):
        pusher.check(completion, [3])


async def test_an_audit_of_the_live_weights_equals_the_trainers_digests(pusher: _Pusher) -> None:
    assert await pusher.sink.digest(3, pusher.plan_hash, timeout_s=20) == pusher.trainer.digests(pusher.layout)
    with pytest.raises(StateError, match="serves version 3"):
        await pusher.sink.digest(2, pusher.plan_hash, timeout_s=20)


async def test_a_wait_that_would_take_too_long_is_refused_and_the_old_version_goes_on(client: RolloutClient, pusher: _Pusher) -> None:
    await pusher.to_verified(4)
    running = await _begin_long(client, "slow")
    with pytest.raises(StateError, match="did not end"):
        await pusher.sink.commit("push-4", 4, InflightMode.WAIT, timeout_s=1.02)
    for completion in [*await running, *await _sample(client)]:
        pusher.check(completion, [3])
    assert await pusher.sink.abort("push-4", timeout_s=10) == 3


async def test_sigterm_lets_running_samples_end_and_leaves_nothing(server: RolloutProcess, client: RolloutClient) -> None:
    assert list(server.shm_dir.iterdir()), "the push before this test left its staging for the next one"
    engine = server.engine_processes()
    running = asyncio.create_task(_sample(client, name="last", sampling=LONG, seeds=tuple(range(4))))
    await until_running(client, 4)
    server.process.terminate()
    completions = await running
    assert all(len(completion.response_ids) == 150 for completion in completions)
    assert await asyncio.to_thread(server.process.wait, 20) == 0
    assert not await is_serving(server.address, SECURITY, timeout_s=2)
    assert not any(process.is_running() for process in engine)
    assert not list(server.shm_dir.iterdir())
