"""Client of one trainer gang (rank 0 serves)."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.clients.base import ServiceClient
from shoal.codec.experience import batch_to_proto
from shoal.codec.services import (
    export_result_from_proto,
    token_scores_from_proto,
    token_sequence_to_proto,
    trainer_description_from_proto,
    update_result_from_proto,
)
from shoal.config.models import SecuritySection
from shoal.errors import CodecError
from shoal.rpc.v1 import trainer_pb2, trainer_pb2_grpc
from shoal.types import Batch, ExportResult, TokenScores, TokenSequence, TrainerDescription, UpdateResult

__all__ = ["ExportResult", "TrainerClient", "TrainerDescription", "UpdateResult"]


class TrainerClient(ServiceClient):
    """Commands one gang. Commands are idempotent under their step, so all of them are retried while the gang is unavailable."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def describe(self, *, timeout_s: float) -> TrainerDescription:
        """Return role, size and committed step of the gang."""
        answer = await self._call_idempotent(self._stub.DescribeTrainer, trainer_pb2.DescribeTrainerRequest(), timeout_s)
        return trainer_description_from_proto(answer)

    async def forward_batch(self, batch: Batch, *, timeout_s: float) -> dict[str, float]:
        """Actor: old and reference log-probabilities; critic: values. Return metrics."""
        request = trainer_pb2.ForwardBatchRequest(batch=batch_to_proto(batch))
        return dict((await self._call_idempotent(self._stub.ForwardBatch, request, timeout_s)).metrics)

    async def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float, *, timeout_s: float) -> dict[str, float]:
        """Compute advantages and returns on the actor. Return metrics. Raises StateError before forward_batch of the step."""
        request = trainer_pb2.ComputeAdvantagesRequest(step=step, kl_coef=kl_coef, kl_loss_coef=kl_loss_coef)
        return dict((await self._call_idempotent(self._stub.ComputeAdvantages, request, timeout_s)).metrics)

    async def update_batch(self, step: int, *, timeout_s: float) -> UpdateResult:
        """Run the optimizer steps of the step's batch; repeating returns the first answer."""
        request = trainer_pb2.UpdateBatchRequest(step=step)
        return update_result_from_proto(await self._call_idempotent(self._stub.UpdateBatch, request, timeout_s))

    async def score_tokens(self, sequences: Sequence[TokenSequence], *, timeout_s: float) -> tuple[list[TokenScores], int]:
        """Score given tokens under the policy as it is; the gang does not change.

        Returns: scores of each sequence, in order; the policy version that they belong to.
        Raises: CodecError: the gang answered for other sequences.
        """
        request = trainer_pb2.ScoreTokensRequest(sequences=[token_sequence_to_proto(sequence) for sequence in sequences])
        answer = await self._call_idempotent(self._stub.ScoreTokens, request, timeout_s)
        scores = [token_scores_from_proto(message) for message in answer.scores]
        wanted, given = [len(sequence.response_ids) for sequence in sequences], [len(score.logprobs) for score in scores]
        if wanted != given:
            raise CodecError(f"responses of {wanted} tokens were to be scored, but scores of {given} came back; use one version of Shoal")
        return scores, answer.policy_version

    async def export_model(self, folder: str, *, timeout_s: float) -> ExportResult:
        """Write a Hugging Face folder on the trainer's file system."""
        request = trainer_pb2.ExportModelRequest(folder=folder)
        return export_result_from_proto(await self._call_idempotent(self._stub.ExportModel, request, timeout_s))
