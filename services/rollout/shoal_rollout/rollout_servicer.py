"""RolloutService over gRPC: convert, ask, convert back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from shoal.codec.rollout import completion_to_proto, rollout_description_to_proto, sampling_params_from_proto
from shoal.config.models import RunConfig
from shoal.rpc.v1 import rollout_pb2, rollout_pb2_grpc
from shoal.types import RolloutDescription
from shoal_rollout.generation import Generation
from shoal_rollout.model_facts import ModelFacts
from shoal_rollout.request_checks import GenerateCall

SERVICE_NAME = "shoal.rpc.v1.RolloutService"
_DRAIN_MARGIN_S = 0.5
"""A Drain call answers this long before its deadline."""
_Context = grpc.aio.ServicerContext[object, object]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves one `Generation`; errors become statuses in the server's interceptor."""

    def __init__(self, generation: Generation, config: RunConfig, service_id: str, facts: ModelFacts) -> None:
        self._generation = generation
        self._config = config
        self._service_id = service_id
        self._facts = facts

    async def DescribeRollout(self, request: rollout_pb2.DescribeRolloutRequest, context: _Context) -> rollout_pb2.DescribeRolloutResponse:
        """Answer facts and state."""
        description = RolloutDescription(
            service_id=self._service_id,
            model=self._config.model.path,
            vocab_size=self._facts.vocab_size,
            max_model_len=self._facts.max_model_len,
            tensor_parallel_size=self._config.rollout.tensor_parallel_size,
            weight_dtype=self._config.rollout.dtype,
            policy_version=self._generation.policy_version,
            num_running=self._generation.num_running,
            draining=self._generation.is_draining,
        )
        return rollout_description_to_proto(description)

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: _Context) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Stream completions."""
        call = GenerateCall(
            request_id=request.request_id,
            prompt_ids=list(request.prompt_ids),
            sampling=sampling_params_from_proto(request.sampling),
            num_samples=request.num_samples,
            seeds=tuple(request.seeds),
            min_policy_version=request.min_policy_version,
        )
        completions = self._generation.generate(call)
        try:
            async for completion in completions:
                yield completion_to_proto(completion)
        finally:
            await completions.aclose()

    async def Abort(self, request: rollout_pb2.AbortRequest, context: _Context) -> rollout_pb2.AbortResponse:
        """End running calls early."""
        return rollout_pb2.AbortResponse(num_aborted=await self._generation.abort(request.request_ids))

    async def Drain(self, request: rollout_pb2.DrainRequest, context: _Context) -> rollout_pb2.DrainResponse:
        """Refuse new calls; wait for running ones until shortly before the deadline."""
        left_s = context.time_remaining()
        timeout_s = max(0.0, (0.0 if left_s is None else left_s) - _DRAIN_MARGIN_S)
        drain = asyncio.ensure_future(self._generation.drain())
        await asyncio.wait({drain}, timeout=timeout_s)
        drain.cancel()
        return rollout_pb2.DrainResponse(num_running=self._generation.num_running)
