"""Scripted rollout, reward and trainer services over real gRPC, registered with a real coordinator.

Tokens are made up from the request's seeds and the served version; no model and no weights exist, but every call, stage,
version and lease is real. Tests script failures through the public attributes.

    async with FakeCluster(coordinator_address, run_id) as cluster:
        cluster.actor.fail_update_at = 2
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import grpc
import numpy as np

from shoal.clients.registry import LeaseKeeper
from shoal.codec.experience import batch_from_proto
from shoal.codec.reward import score_result_to_proto, score_sample_from_proto
from shoal.codec.rollout import completion_to_proto, sampling_params_from_proto
from shoal.codec.services import export_result_to_proto, trainer_description_to_proto, update_result_to_proto
from shoal.codec.weights import (
    sink_committed_to_proto,
    sink_layout_from_proto,
    sink_layout_to_proto,
    sink_verified_to_proto,
    source_prepared_to_proto,
    source_shard_to_proto,
    source_transferred_to_proto,
)
from shoal.config.models import SecuritySection
from shoal.errors import InternalError, StalePolicyError, StateError
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import (
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from shoal.types import (
    Batch,
    Box,
    Completion,
    CopyDigest,
    ExportResult,
    FinishReason,
    PolicyVersionSpan,
    ScoreResult,
    ScoreSample,
    ScoreStatus,
    ServiceInfo,
    ServiceKind,
    SinkCommitted,
    SinkLayout,
    SinkParameter,
    SinkRegion,
    SinkVerified,
    SinkWorkerLayout,
    SourcePrepared,
    SourceShard,
    SourceTransferred,
    TrainerDescription,
    TrainerRole,
    UpdateResult,
)
from shoal.weights.planner import PushPlan, plan_copies

Context = grpc.aio.ServicerContext[Any, Any]
SECURITY = SecuritySection(insecure=True)
SHAPE = (4,)
WHOLE = Box(offsets=(0,), sizes=SHAPE)


class FakeService:
    """A gRPC server that registers itself; subclasses add servicers in `add_to`."""

    kind: ServiceKind

    def __init__(self, service_id: str, run_id: str, coordinator_address: str) -> None:
        self.service_id = service_id
        self.run_id = run_id
        self.policy_version = 0
        self._coordinator_address = coordinator_address
        self._stack = AsyncExitStack()
        self.lease: LeaseKeeper | None = None

    def add_to(self, server: RpcServer) -> None:
        """Add the servicers."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        server = RpcServer("127.0.0.1", 0, SECURITY)
        self.add_to(server)
        port = await server.start()
        server.set_serving(True)
        self._stack.push_async_callback(server.stop, 0.0)
        info = ServiceInfo(
            run_id=self.run_id,
            service_id=self.service_id,
            kind=self.kind,
            address=f"127.0.0.1:{port}",
            incarnation=uuid.uuid4().hex,
            policy_version=self.policy_version,
        )
        self.lease = await self._stack.enter_async_context(LeaseKeeper(self._coordinator_address, info, SECURITY))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class FakeRollout(FakeService, rollout_pb2_grpc.RolloutServiceServicer, weights_pb2_grpc.WeightSinkServiceServicer):
    """Generates seeded token ids at once; clear `may_generate` to make it hang."""

    kind = ServiceKind.ROLLOUT

    def __init__(self, service_id: str, run_id: str, coordinator_address: str, *, vocab_size: int) -> None:
        super().__init__(service_id, run_id, coordinator_address)
        self.vocab_size = vocab_size
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.generated_at: list[int] = []
        self.commits: list[int] = []
        self.refuse_prepare: Callable[[], Exception | None] = lambda: None

    def add_to(self, server: RpcServer) -> None:
        """Add both servicers."""
        server.add(lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, s), "shoal.rpc.v1.RolloutService")
        server.add(lambda s: weights_pb2_grpc.add_WeightSinkServiceServicer_to_server(self, s), "shoal.rpc.v1.WeightSinkService")

    async def DescribeRollout(self, request: object, context: Context) -> rollout_pb2.DescribeRolloutResponse:
        """Answer made-up facts."""
        return rollout_pb2.DescribeRolloutResponse(
            service_id=self.service_id,
            model="fake",
            vocab_size=self.vocab_size,
            max_model_len=64,
            tensor_parallel_size=1,
            weight_dtype=common_pb2.DATA_TYPE_FLOAT32,
            policy_version=self.policy_version,
        )

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Context) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Stream one completion per sample."""
        if self.policy_version < request.min_policy_version:
            raise StalePolicyError(f"serves {self.policy_version}, wanted {request.min_policy_version}")
        self.generated_at.append(self.policy_version)
        await self.may_generate.wait()
        sampling = sampling_params_from_proto(request.sampling)
        for index in range(request.num_samples):
            seed = request.seeds[index] if request.seeds else index
            yield completion_to_proto(self._completion(index, seed, sampling.max_new_tokens))

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Context) -> rollout_pb2.AbortResponse:
        """Nothing runs for long."""
        return rollout_pb2.AbortResponse(num_aborted=0)

    async def Drain(self, request: object, context: Context) -> rollout_pb2.DrainResponse:
        """Nothing runs for long."""
        return rollout_pb2.DrainResponse(num_running=0)

    def _completion(self, index: int, seed: int, max_new_tokens: int) -> Completion:
        ids = np.random.default_rng(seed).integers(3, self.vocab_size, size=max_new_tokens, dtype=np.int32)
        return Completion(
            sample_index=index,
            response_ids=ids,
            rollout_logprobs=np.full(ids.shape, -1.0, dtype=np.float32),
            finish_reason=FinishReason.LENGTH,
            policy_version_spans=(PolicyVersionSpan(policy_version=self.policy_version, start=0, end=max_new_tokens),),
            latency_ms=1.0,
            engine_id=self.service_id,
        )

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: Context) -> weights_pb2.PrepareSinkResponse:
        """Answer the layout of one worker with one parameter."""
        if (error := self.refuse_prepare()) is not None:
            raise error
        return weights_pb2.PrepareSinkResponse(
            layout=sink_layout_to_proto(make_layout(self.service_id)), served_policy_version=self.policy_version
        )

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: Context) -> weights_pb2.VerifySinkResponse:
        """Accept any digests."""
        return sink_verified_to_proto(SinkVerified(num_bytes=16, verify_ms=0.1))

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: Context) -> weights_pb2.CommitSinkResponse:
        """Serve the new version."""
        self.policy_version = request.policy_version
        self.commits.append(request.policy_version)
        if self.lease is not None:
            self.lease.policy_version = request.policy_version
        return sink_committed_to_proto(SinkCommitted(policy_version=self.policy_version, pause_ms=0.5))

    async def AbortSink(self, request: weights_pb2.AbortSinkRequest, context: Context) -> weights_pb2.AbortSinkResponse:
        """Stay on the old version."""
        return weights_pb2.AbortSinkResponse(served_policy_version=self.policy_version)


class FakeReward(FakeService, reward_pb2_grpc.RewardServiceServicer):
    """Scores with `score`, 1.0 for every even sample unless changed."""

    kind = ServiceKind.REWARD

    def __init__(self, service_id: str, run_id: str, coordinator_address: str, *, scorer: str = "fake") -> None:
        super().__init__(service_id, run_id, coordinator_address)
        self.scorer = scorer
        self.num_scored = 0
        self.score: Callable[[ScoreSample], ScoreResult] = self._score_parity

    def add_to(self, server: RpcServer) -> None:
        """Add the servicer."""
        server.add(lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(self, s), "shoal.rpc.v1.RewardService")

    def _score_parity(self, sample: ScoreSample) -> ScoreResult:
        self.num_scored += 1
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(self.num_scored % 2))

    async def DescribeReward(self, request: object, context: Context) -> reward_pb2.DescribeRewardResponse:
        """Answer the one scorer."""
        scorers = [reward_pb2.ScorerDescription(name=self.scorer, version="1", description="scripted")]
        return reward_pb2.DescribeRewardResponse(service_id=self.service_id, scorers=scorers)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
        """Score each sample."""
        results = [score_result_to_proto(self.score(score_sample_from_proto(sample))) for sample in request.samples]
        return reward_pb2.ScoreResponse(scorer=self.scorer, version="1", results=results)


class FakeGang(FakeService, trainer_pb2_grpc.TrainerServiceServicer):
    """Keeps the contract of a gang: forward before advantages and update, a repeated update answers the same."""

    def __init__(self, service_id: str, run_id: str, coordinator_address: str) -> None:
        super().__init__(service_id, run_id, coordinator_address)
        self.kind = ServiceKind(service_id)
        self.batches: dict[int, Batch] = {}
        self.calls: list[str] = []
        self.fail_update_at: int | None = None
        self.may_update = asyncio.Event()
        self.may_update.set()

    def add_to(self, server: RpcServer) -> None:
        """Add the servicer."""
        server.add(lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, s), "shoal.rpc.v1.TrainerService")

    async def DescribeTrainer(self, request: object, context: Context) -> trainer_pb2.DescribeTrainerResponse:
        """Answer the committed step."""
        return trainer_description_to_proto(
            TrainerDescription(
                service_id=self.service_id,
                role=TrainerRole(self.kind.value),
                world_size=1,
                num_parameters=4,
                step=self.policy_version,
                has_reference=True,
            )
        )

    async def ForwardBatch(self, request: trainer_pb2.ForwardBatchRequest, context: Context) -> trainer_pb2.ForwardBatchResponse:
        """Keep the batch."""
        batch = batch_from_proto(request.batch)
        self.batches[batch.step] = batch
        self.calls.append(f"forward {batch.step}")
        return trainer_pb2.ForwardBatchResponse(metrics={"kl": 0.01, "entropy": 1.0} if self.kind is ServiceKind.ACTOR else {})

    async def ComputeAdvantages(
        self, request: trainer_pb2.ComputeAdvantagesRequest, context: Context
    ) -> trainer_pb2.ComputeAdvantagesResponse:
        """Insist on the order."""
        self._require_batch(request.step)
        self.calls.append(f"advantages {request.step}")
        return trainer_pb2.ComputeAdvantagesResponse(metrics={"advantage_std": 1.0})

    async def UpdateBatch(self, request: trainer_pb2.UpdateBatchRequest, context: Context) -> trainer_pb2.UpdateBatchResponse:
        """Advance the version."""
        self._require_batch(request.step)
        await self.may_update.wait()
        if self.fail_update_at == request.step:
            raise InternalError("scripted failure of the update")
        self.calls.append(f"update {request.step}")
        self.policy_version = request.step
        metrics = {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-5}
        return update_result_to_proto(UpdateResult(policy_version=self.policy_version, applied=True, metrics=metrics))

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Context) -> trainer_pb2.ExportModelResponse:
        """Pretend to write."""
        self.calls.append(f"export {request.folder}")
        return export_result_to_proto(ExportResult(folder=request.folder, policy_version=self.policy_version, num_bytes=16))

    def _require_batch(self, step: int) -> None:
        if step not in self.batches:
            raise StateError(f"no forward pass of step {step} has run")


class FakeActor(FakeGang, weights_pb2_grpc.WeightSourceServiceServicer):
    """A gang that can be the source of a push."""

    def __init__(self, run_id: str, coordinator_address: str) -> None:
        super().__init__("actor", run_id, coordinator_address)
        self._plan: PushPlan | None = None
        self.pushes: list[int] = []

    def add_to(self, server: RpcServer) -> None:
        """Add both servicers."""
        super().add_to(server)
        server.add(lambda s: weights_pb2_grpc.add_WeightSourceServiceServicer_to_server(self, s), "shoal.rpc.v1.WeightSourceService")

    async def DescribeSource(self, request: object, context: Context) -> weights_pb2.DescribeSourceResponse:
        """One rank holds everything."""
        return weights_pb2.DescribeSourceResponse(shards=[source_shard_to_proto(make_shard())], policy_version=self.policy_version)

    async def PrepareSource(self, request: weights_pb2.PrepareSourceRequest, context: Context) -> weights_pb2.PrepareSourceResponse:
        """Plan as a real rank does."""
        self._plan = plan_copies([make_shard()], [sink_layout_from_proto(sink) for sink in request.sinks])
        self.pushes.append(request.policy_version)
        return source_prepared_to_proto(SourcePrepared(plan_hash=self._plan.plan_hash, num_copies=len(self._plan.copies), num_bytes=16))

    async def TransferSource(self, request: weights_pb2.TransferSourceRequest, context: Context) -> weights_pb2.TransferSourceResponse:
        """Claim that every copy was written."""
        digests: dict[str, list[CopyDigest]] = {}
        for copy in self._plan.copies if self._plan is not None else ():
            digest = CopyDigest(worker_rank=copy.worker_rank, parameter=copy.parameter, parameter_box=copy.parameter_box, xxh3=1)
            digests.setdefault(copy.server_id, []).append(digest)
        return source_transferred_to_proto(SourceTransferred(digests=digests, num_bytes=16, transfer_ms=0.1))

    async def AbortSource(self, request: weights_pb2.AbortSourceRequest, context: Context) -> weights_pb2.AbortSourceResponse:
        """Drop the plan."""
        self._plan = None
        return weights_pb2.AbortSourceResponse()


def make_shard() -> SourceShard:
    """The one tensor of the fake model."""
    return SourceShard(name="w", shape=SHAPE, dtype="float32", rank=0, box=WHOLE)


def make_layout(server_id: str) -> SinkLayout:
    """One worker that needs the whole tensor."""
    parameter = SinkParameter(name="w", shape=SHAPE, dtype="float32", staging_offset_bytes=0)
    region = SinkRegion(parameter="w", source_name="w", source_box=WHOLE, parameter_box=WHOLE)
    worker = SinkWorkerLayout(worker_rank=0, parameters=(parameter,), regions=(region,), staging_path="/nowhere", staging_bytes=16)
    return SinkLayout(server_id=server_id, workers=(worker,))


class FakeCluster:
    """One rollout server, a reward server, an actor and a critic; all registered while the block runs."""

    def __init__(self, coordinator_address: str, run_id: str, *, vocab_size: int, critic: bool = True) -> None:
        self.rollout = FakeRollout("rollout-0", run_id, coordinator_address, vocab_size=vocab_size)
        self.reward = FakeReward("reward-0", run_id, coordinator_address)
        self.actor = FakeActor(run_id, coordinator_address)
        self.critic = FakeGang("critic", run_id, coordinator_address) if critic else None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        services: list[FakeService] = [self.rollout, self.reward, self.actor]
        for service in services if self.critic is None else [*services, self.critic]:
            await self._stack.enter_async_context(service)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
