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
from shoal.codec.services import (
    export_result_to_proto,
    token_scores_to_proto,
    trainer_description_to_proto,
    update_result_to_proto,
)
from shoal.config.models import SecuritySection
from shoal.errors import InternalError, StalePolicyError, StateError, UnavailableError
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import (
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2_grpc,
)
from shoal.types import (
    Batch,
    Completion,
    ExportResult,
    FinishReason,
    PolicyVersionSpan,
    ScoreResult,
    ScoreSample,
    ScoreStatus,
    ServiceInfo,
    ServiceKind,
    TokenScores,
    TrainerDescription,
    TrainerRole,
    UpdateResult,
)
from tests.helpers.fake_push_ends import SinkServicer, SourceServicer, make_layout, make_source_layout
from tests.helpers.push_fakes import ScriptedSink, ScriptedSource

Context = grpc.aio.ServicerContext[Any, Any]
SECURITY = SecuritySection(insecure=True)


class FakeService:
    """A gRPC server that registers itself; subclasses add servicers in `add_to`."""

    kind: ServiceKind

    def __init__(self, service_id: str, run_id: str, coordinator_address: str) -> None:
        self.service_id = service_id
        self.run_id = run_id
        self.policy_version = 0
        self.address = ""
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
        self.address = f"127.0.0.1:{port}"
        info = ServiceInfo(
            run_id=self.run_id,
            service_id=self.service_id,
            kind=self.kind,
            address=self.address,
            incarnation=uuid.uuid4().hex,
            policy_version=self.policy_version,
        )
        keeper = LeaseKeeper(self._coordinator_address, info, SECURITY, on_required_version=self.require_version)
        self.lease = await self._stack.enter_async_context(keeper)
        return self

    def require_version(self, policy_version: int) -> None:
        """The coordinator says which version a rollout server must serve before it answers."""

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


class FakeRollout(FakeService, rollout_pb2_grpc.RolloutServiceServicer):
    """Generates seeded token ids at once; clear `may_generate` to make it hang, `hangs` is set once it does.

    The last sample of every group that is generated while `sticks_at` is the served version never ends; num_cancelled counts such calls
    that were cancelled.

    `sink` scripts its end of pushes.

    As a real one, it refuses requests while it is older than the version that the coordinator requires; num_refused counts them.
    """

    kind = ServiceKind.ROLLOUT

    def __init__(self, service_id: str, run_id: str, coordinator_address: str, *, vocab_size: int) -> None:
        self.sink = ScriptedSink(make_layout(service_id))
        super().__init__(service_id, run_id, coordinator_address)
        self.vocab_size = vocab_size
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.hangs = asyncio.Event()
        self.generated_at: list[int] = []
        self.required_versions: list[int] = []
        self.num_refused = 0
        self.sticks_at: int | None = None
        self.num_cancelled = 0
        self.commits: list[int] = []

    @property
    def policy_version(self) -> int:
        """The version being served."""
        return self.sink.served_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self.sink.served_version = policy_version

    def require_version(self, policy_version: int) -> None:
        """See the class."""
        self.required_versions.append(policy_version)

    def add_to(self, server: RpcServer) -> None:
        """Add both servicers."""
        server.add(lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, s), "shoal.rpc.v1.RolloutService")
        sink = SinkServicer(self.sink, self._committed)
        server.add(lambda s: weights_pb2_grpc.add_WeightSinkServiceServicer_to_server(sink, s), "shoal.rpc.v1.WeightSinkService")

    def _committed(self, policy_version: int) -> None:
        self.commits.append(policy_version)
        if self.lease is not None:
            self.lease.policy_version = policy_version

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
        if self.policy_version < max([0, *self.required_versions[-1:]]):
            self.num_refused += 1
            raise UnavailableError(f"serves {self.policy_version}, required is {self.required_versions[-1]}")
        if self.policy_version < request.min_policy_version:
            raise StalePolicyError(f"serves {self.policy_version}, wanted {request.min_policy_version}")
        self.generated_at.append(self.policy_version)
        if not self.may_generate.is_set():
            self.hangs.set()
        await self.may_generate.wait()
        sampling = sampling_params_from_proto(request.sampling)
        for index in range(request.num_samples):
            seed = request.seeds[index] if request.seeds else index
            if self.policy_version == self.sticks_at and index == request.num_samples - 1:
                await self._stick()
            yield completion_to_proto(self._completion(index, seed, sampling.max_new_tokens))

    async def _stick(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

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
        self.policy_version += 1
        metrics = {"loss": 0.5, "grad_norm": 1.0, "lr": 1e-5}
        return update_result_to_proto(UpdateResult(policy_version=self.policy_version, applied=True, metrics=metrics))

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Context) -> trainer_pb2.ExportModelResponse:
        """Pretend to write."""
        self.calls.append(f"export {request.folder}")
        return export_result_to_proto(ExportResult(folder=request.folder, policy_version=self.policy_version, num_bytes=16))

    async def ScoreTokens(self, request: trainer_pb2.ScoreTokensRequest, context: Context) -> trainer_pb2.ScoreTokensResponse:
        """Agree with the fake rollout server in everything."""
        scores = [
            TokenScores(logprobs=(-1.0,) * len(sequence.response_ids), greedy_ids=tuple(sequence.response_ids))
            for sequence in request.sequences
        ]
        return trainer_pb2.ScoreTokensResponse(scores=map(token_scores_to_proto, scores), policy_version=self.policy_version)

    def _require_batch(self, step: int) -> None:
        if step not in self.batches:
            raise StateError(f"no forward pass of step {step} has run")


class FakeActor(FakeGang):
    """A gang that can be the source of a push; `source` scripts it."""

    def __init__(self, run_id: str, coordinator_address: str) -> None:
        self.source = ScriptedSource(make_source_layout(), 0)
        super().__init__("actor", run_id, coordinator_address)
        self.pushes: list[int] = []

    @property
    def policy_version(self) -> int:
        """The version being held."""
        return self.source.policy_version

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        self.source.policy_version = policy_version

    def add_to(self, server: RpcServer) -> None:
        """Add both servicers."""
        super().add_to(server)
        source = SourceServicer(self.source, self.pushes.append)
        server.add(lambda s: weights_pb2_grpc.add_WeightSourceServiceServicer_to_server(source, s), "shoal.rpc.v1.WeightSourceService")


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
