"""Typed clients against real servers."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import aclosing

import numpy as np
import pytest

from shoal.clients.reward import RewardClient
from shoal.clients.rollout import RolloutClient
from shoal.clients.trainer import TrainerClient
from shoal.codec.reward import score_result_to_proto
from shoal.codec.rollout import completion_to_proto
from shoal.errors import CodecError, ConfigError, DeadlineError, InvalidRequestError, StalePolicyError, UnavailableError
from shoal.rpc.v1 import (
    experience_pb2,
    reward_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
)
from shoal.types import (
    Batch,
    Completion,
    FinishReason,
    MiniBatch,
    PolicyVersionSpan,
    RecordRef,
    SamplingParams,
    ScoreResult,
    ScoreSample,
    ScoreStatus,
    TokenScores,
    TokenSequence,
    UpdateResult,
)
from tests.helpers.rpc_child import describe_scorer
from tests.helpers.rpc_services import (
    PLAINTEXT,
    REWARD_SERVICE,
    ROLLOUT_SERVICE,
    FakeReward,
    FakeRollout,
    ready,
    register_reward,
    register_rollout,
    serving,
)

SAMPLING = SamplingParams(max_new_tokens=4, stop_token_ids=(2,))


def _completion(sample_index: int) -> Completion:
    return Completion(
        sample_index=sample_index,
        response_ids=np.array([5, 6, 2], dtype=np.int32),
        rollout_logprobs=np.array([-0.5, -0.25, -1.0], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        policy_version_spans=(PolicyVersionSpan(policy_version=7, start=0, end=3),),
        latency_ms=1.5,
        engine_id="rollout-0",
    )


def _sample(sample_id: str) -> ScoreSample:
    return ScoreSample(
        sample_id=sample_id, prompt="1+1=", response="2", row={"answer": "2"}, finish_reason=FinishReason.STOP, num_response_tokens=1
    )


async def test_generate_yields_completions_and_sends_what_was_asked() -> None:
    servicer = FakeRollout([completion_to_proto(_completion(index)) for index in (1, 0)])
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        stream = client.generate("r-1", np.array([3, 4], dtype=np.int32), SAMPLING, 2, seeds=(8, 9), min_policy_version=6, timeout_s=5)
        completions = [completion async for completion in stream]
    assert [completion.sample_index for completion in completions] == [1, 0]
    assert completions[0].response_ids.tolist() == [5, 6, 2]
    (request,) = servicer.requests
    assert (list(request.prompt_ids), list(request.seeds), request.min_policy_version) == ([3, 4], [8, 9], 6)


async def test_generate_closed_early_cancels_the_call_on_the_server() -> None:
    servicer = FakeRollout([completion_to_proto(_completion(0))])
    servicer.release.clear()
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        async with aclosing(client.generate("r-1", [3], SAMPLING, 2, timeout_s=30)) as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(10):
            await servicer.ended.wait()
    assert servicer.cancelled


async def test_generate_cancelled_task_cancels_the_call_on_the_server() -> None:
    servicer = FakeRollout([completion_to_proto(_completion(0))])
    servicer.release.clear()
    first = asyncio.Event()

    async def read(client: RolloutClient) -> None:
        async for _ in client.generate("r-1", [3], SAMPLING, 2, timeout_s=30):
            first.set()

    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        task = asyncio.create_task(read(client))
        await first.wait()
        task.cancel()
        async with asyncio.timeout(10):
            await servicer.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert servicer.cancelled


async def test_generate_deadline_passes_as_deadline_error() -> None:
    servicer = FakeRollout([])
    servicer.release.clear()
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        with pytest.raises(DeadlineError):
            await anext(client.generate("r-1", [3], SAMPLING, 1, timeout_s=0.2))
    assert servicer.cancelled


@pytest.mark.parametrize("failure", [UnavailableError("draining"), StalePolicyError("serves 3, wanted 4")])
async def test_generate_is_never_retried(failure: Exception) -> None:
    servicer = FakeRollout([])
    servicer.failure = failure
    async with serving(register_rollout(servicer), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        with pytest.raises(type(failure), match=str(failure)):
            await anext(client.generate("r-1", [3], SAMPLING, 1, timeout_s=10))
    assert len(servicer.requests) == 1


async def test_score_is_not_retried_by_the_client() -> None:
    async def fail(request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        raise UnavailableError("warming up")

    servicer = FakeReward(fail)
    async with serving(register_reward(servicer), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(UnavailableError, match="warming up"):
            await client.score("exact", "", [], timeout_s=30)
    assert servicer.num_calls == 1


async def test_idempotent_call_is_retried_while_unavailable_and_not_otherwise() -> None:
    failures: list[Exception] = [
        UnavailableError("warming up"),
        UnavailableError("warming up"),
        InvalidRequestError("bad"),
        UnavailableError("x"),
    ]

    class _Failing(FakeReward):
        async def DescribeReward(self, request: reward_pb2.DescribeRewardRequest, context: object) -> reward_pb2.DescribeRewardResponse:
            raise failures.pop(0)

    async with serving(register_reward(_Failing()), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        with pytest.raises(InvalidRequestError, match="bad"):
            await client.describe(timeout_s=30)
    assert len(failures) == 1


async def test_score_returns_results_in_order_with_the_version() -> None:
    results = [
        ScoreResult(sample_id="a", status=ScoreStatus.SCORED, value=1.0, components={"exact": 1.0}),
        ScoreResult(sample_id="b", status=ScoreStatus.NOT_SCORED, message="too long"),
    ]
    answer = reward_pb2.ScoreResponse(version="2", results=[score_result_to_proto(result) for result in results])
    async with (
        serving(register_reward(FakeReward(lambda _: ready(answer))), REWARD_SERVICE) as address,
        RewardClient(address, PLAINTEXT) as client,
    ):
        assert await client.score("exact", "", [_sample("a"), _sample("b")], timeout_s=5) == ("2", results)
        with pytest.raises(CodecError, match="one result per sample, in order"):
            await client.score("exact", "", [_sample("b"), _sample("a")], timeout_s=5)
        with pytest.raises(CodecError, match="2 results for 1 samples"):
            await client.score("exact", "", [_sample("a")], timeout_s=5)


async def test_client_unreachable_peer_is_named_within_the_attempts() -> None:
    async with serving(register_reward(FakeReward()), REWARD_SERVICE) as address:
        pass
    async with RewardClient(address, PLAINTEXT) as client:
        start_s = time.monotonic()
        with pytest.raises(UnavailableError, match=f"reward at {address}"):
            await client.describe(timeout_s=60)
    assert time.monotonic() - start_s < 30


async def test_client_reconnects_to_a_restarted_server() -> None:
    async with serving(register_reward(FakeReward()), REWARD_SERVICE) as address:
        client = RewardClient(address, PLAINTEXT)
        await client.describe(timeout_s=5)
    async with serving(register_reward(FakeReward()), REWARD_SERVICE, port=int(address.rpartition(":")[2])):
        (scorer,) = await client.describe(timeout_s=30)
    await client.close()
    assert scorer.name == "exact"


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:0", "host:70000", "host:http"])
async def test_client_bad_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        RewardClient(address, PLAINTEXT)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_child_process_of_a_parent_with_a_channel_gets_its_answer(method: str) -> None:
    async with serving(register_reward(FakeReward()), REWARD_SERVICE) as address, RewardClient(address, PLAINTEXT) as client:
        await client.describe(timeout_s=5)
        with multiprocessing.get_context(method).Pool(1) as pool:
            name = await asyncio.to_thread(lambda: pool.apply_async(describe_scorer, (address,)).get(timeout=60))
    assert name == "exact"


REF = RecordRef(key="k", group_id="g", num_prompt_tokens=2, num_response_tokens=3, reward=0.5)
BATCH = Batch(run_id="r", step=4, ranks=((MiniBatch(micro_batches=((REF,), ())),), (MiniBatch(micro_batches=((), (REF,))),)))


class _FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self) -> None:
        self.batch = experience_pb2.Batch()
        self.num_forgotten = 0

    async def ForwardBatch(self, request: trainer_pb2.ForwardBatchRequest, context: object) -> trainer_pb2.ForwardBatchResponse:
        self.batch = request.batch
        return trainer_pb2.ForwardBatchResponse(metrics={"kl": 0.25})

    async def ComputeAdvantages(
        self, request: trainer_pb2.ComputeAdvantagesRequest, context: object
    ) -> trainer_pb2.ComputeAdvantagesResponse:
        return trainer_pb2.ComputeAdvantagesResponse(
            metrics={"step": request.step, "kl_coef": request.kl_coef, "kl_loss_coef": request.kl_loss_coef}
        )

    async def UpdateBatch(self, request: trainer_pb2.UpdateBatchRequest, context: object) -> trainer_pb2.UpdateBatchResponse:
        return trainer_pb2.UpdateBatchResponse(policy_version=request.step, applied=True, metrics={"loss": float("inf")})

    async def ScoreTokens(self, request: trainer_pb2.ScoreTokensRequest, context: object) -> trainer_pb2.ScoreTokensResponse:
        lengths = [max(len(sequence.response_ids) - self.num_forgotten, 0) for sequence in request.sequences]
        scores = [trainer_pb2.TokenScores(logprobs=[-0.5] * length, greedy_ids=[length] * length) for length in lengths]
        return trainer_pb2.ScoreTokensResponse(scores=scores, policy_version=8)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: object) -> trainer_pb2.ExportModelResponse:
        return trainer_pb2.ExportModelResponse(folder=request.folder, policy_version=9, num_bytes=1 << 40)

    async def DescribeTrainer(self, request: trainer_pb2.DescribeTrainerRequest, context: object) -> trainer_pb2.DescribeTrainerResponse:
        return trainer_pb2.DescribeTrainerResponse(service_id="actor", role=trainer_pb2.TRAINER_ROLE_ACTOR, world_size=2, step=3)


async def test_trainer_client_carries_every_command() -> None:
    servicer = _FakeTrainer()
    async with (
        serving(lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, s), "shoal.rpc.v1.TrainerService") as address,
        TrainerClient(address, PLAINTEXT) as client,
    ):
        assert await client.forward_batch(BATCH, timeout_s=5) == {"kl": 0.25}
        assert [len(rank.mini_batches) for rank in servicer.batch.ranks] == [1, 1]
        assert await client.compute_advantages(4, 0.125, 0.5, timeout_s=5) == {"step": 4.0, "kl_coef": 0.125, "kl_loss_coef": 0.5}
        assert await client.update_batch(5, timeout_s=5) == UpdateResult(policy_version=5, applied=True, metrics={"loss": float("inf")})
        assert (await client.export_model("/out", timeout_s=5)).num_bytes == 1 << 40
        assert (await client.describe(timeout_s=5)).world_size == 2


async def test_trainer_client_scores_every_response_token_or_fails() -> None:
    servicer = _FakeTrainer()
    sequences = [TokenSequence(prompt_ids=(1,), response_ids=(5, 6)), TokenSequence(prompt_ids=(1, 2), response_ids=())]
    async with (
        serving(lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, s), "shoal.rpc.v1.TrainerService") as address,
        TrainerClient(address, PLAINTEXT) as client,
    ):
        scores, policy_version = await client.score_tokens(sequences, timeout_s=5)
        assert policy_version == 8
        assert scores == [TokenScores(logprobs=(-0.5, -0.5), greedy_ids=(2, 2)), TokenScores(logprobs=(), greedy_ids=())]
        servicer.num_forgotten = 1
        with pytest.raises(CodecError, match=r"responses of \[2, 0\] tokens .* scores of \[1, 0\]"):
            await client.score_tokens(sequences, timeout_s=5)


async def test_describe_rollout_reads_every_field() -> None:
    async with serving(register_rollout(FakeRollout([])), ROLLOUT_SERVICE) as address, RolloutClient(address, PLAINTEXT) as client:
        description = await client.describe(timeout_s=5)
        assert (description.vocab_size, description.weight_dtype, description.policy_version, description.draining) == (
            30,
            "float32",
            4,
            True,
        )
        assert await client.abort(["a", "b"], timeout_s=5) == 2
        assert await client.drain(timeout_s=5) == 5
