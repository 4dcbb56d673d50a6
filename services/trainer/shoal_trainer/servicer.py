"""TrainerService on rank 0: hands each call to the gang and answers with rank 0's result."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.codec.services import trainer_description_to_proto
from shoal.rpc.v1 import trainer_pb2, trainer_pb2_grpc
from shoal.types import TrainerDescription
from shoal_trainer.commands import ADVANTAGES, EXPORT, FORWARD, SCORE, UPDATE

SERVICE_NAME = "shoal.rpc.v1.TrainerService"


class CommandRunner(Protocol):
    """Runs a command on every rank; `shoal_trainer.gang.Gang`."""

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Answer one result per rank."""
        ...


class Describer(Protocol):
    """Describes the gang without waiting for a running command."""

    def __call__(self) -> TrainerDescription:
        """Facts and the current step."""
        ...


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """The wire of a gang."""

    def __init__(self, gang: CommandRunner, describe: Describer) -> None:
        self._gang = gang
        self._describe = describe

    async def DescribeTrainer(
        self,
        request: trainer_pb2.DescribeTrainerRequest,
        context: Any,  # noqa: ANN401 - grpcio's context is generic over messages
    ) -> trainer_pb2.DescribeTrainerResponse:
        """Describe the gang."""
        return trainer_description_to_proto(self._describe())

    async def ForwardBatch(
        self,
        request: trainer_pb2.ForwardBatchRequest,
        context: Any,  # noqa: ANN401
    ) -> trainer_pb2.ForwardBatchResponse:
        """Run the first forward of a step."""
        return trainer_pb2.ForwardBatchResponse.FromString(await self._run(FORWARD, request.SerializeToString(), context))

    async def ComputeAdvantages(
        self,
        request: trainer_pb2.ComputeAdvantagesRequest,
        context: Any,  # noqa: ANN401
    ) -> trainer_pb2.ComputeAdvantagesResponse:
        """Compute advantages and write `returns`."""
        return trainer_pb2.ComputeAdvantagesResponse.FromString(await self._run(ADVANTAGES, request.SerializeToString(), context))

    async def UpdateBatch(
        self,
        request: trainer_pb2.UpdateBatchRequest,
        context: Any,  # noqa: ANN401
    ) -> trainer_pb2.UpdateBatchResponse:
        """Run the optimizer steps."""
        return trainer_pb2.UpdateBatchResponse.FromString(await self._run(UPDATE, request.SerializeToString(), context))

    async def ScoreTokens(
        self,
        request: trainer_pb2.ScoreTokensRequest,
        context: Any,  # noqa: ANN401
    ) -> trainer_pb2.ScoreTokensResponse:
        """Score given responses."""
        return trainer_pb2.ScoreTokensResponse.FromString(await self._run(SCORE, request.SerializeToString(), context))

    async def ExportModel(
        self,
        request: trainer_pb2.ExportModelRequest,
        context: Any,  # noqa: ANN401
    ) -> trainer_pb2.ExportModelResponse:
        """Write a Hugging Face folder."""
        return trainer_pb2.ExportModelResponse.FromString(await self._run(EXPORT, request.SerializeToString(), context))

    async def _run(self, command: str, payload: bytes, context: Any) -> bytes:  # noqa: ANN401
        return (await self._gang.run(command, payload, context.time_remaining()))[0]
