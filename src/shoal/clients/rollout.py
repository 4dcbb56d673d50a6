"""Client of one rollout server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.clients.base import ServiceClient
from shoal.codec.rollout import completion_from_proto, rollout_description_from_proto, sampling_params_to_proto
from shoal.config.models import SecuritySection
from shoal.rpc.v1 import rollout_pb2, rollout_pb2_grpc
from shoal.types import Completion, RolloutDescription, SamplingParams

__all__ = ["RolloutClient", "RolloutDescription"]


class RolloutClient(ServiceClient):
    """Generates on one rollout server."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> RolloutDescription:
        """Return static facts and the current state of the server."""
        answer = await self._call_idempotent(self._stub.DescribeRollout, rollout_pb2.DescribeRolloutRequest(), timeout_s)
        return rollout_description_from_proto(answer)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        """Yield each completion of a group as it finishes; never retried.

        Closing the generator, or cancelling its reader, cancels what still runs; leave the loop early only inside `contextlib.aclosing`.

        Args:
            request_id: Unique per attempt.
            prompt_ids: [P] token ids.
            sampling: Parameters of every sample.
            num_samples: Completions wanted.
            seeds: One per sample, or empty.
            min_policy_version: A server that serves an older one refuses with UnavailableError.
            timeout_s: Deadline of the whole group, in seconds.
        Raises: ShoalError: as the server says; UnavailableError while it drains or cannot be reached.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=request_id,
            prompt_ids=[int(token) for token in prompt_ids],
            sampling=sampling_params_to_proto(sampling),
            num_samples=num_samples,
            seeds=seeds,
            min_policy_version=min_policy_version,
        )
        with self._translated():
            call = self._stub.Generate(request, timeout=timeout_s)
            try:
                async for message in call:
                    yield completion_from_proto(message)
            finally:
                call.cancel()

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float) -> int:
        """Abort running completions; return how many there were. Their streams answer with partial tokens."""
        answer = await self._call_idempotent(self._stub.Abort, rollout_pb2.AbortRequest(request_ids=request_ids), timeout_s)
        return answer.num_aborted

    async def drain(self, *, timeout_s: float) -> int:
        """Stop taking requests, wait for the running ones until the deadline; return how many still run."""
        answer = await self._call_idempotent(self._stub.Drain, rollout_pb2.DrainRequest(), timeout_s)
        return answer.num_running
