"""The trainer's commands on one rank: request bytes to answer bytes, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shoal.codec.experience import batch_from_proto
from shoal.codec.services import export_result_to_proto, token_scores_to_proto, token_sequence_from_proto, update_result_to_proto
from shoal.rpc.v1 import trainer_pb2
from shoal.types import Batch, ExportResult, TokenScores, TokenSequence, UpdateResult

FORWARD, ADVANTAGES, UPDATE, EXPORT = "trainer.forward", "trainer.advantages", "trainer.update", "trainer.export"
SCORE = "trainer.score"


class Trainer(Protocol):
    """The actor or the critic on this rank."""

    def forward_batch(self, batch: Batch) -> dict[str, float]:
        """Run the first forward of a step."""
        ...

    def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float) -> dict[str, float]:
        """Turn rewards into advantages."""
        ...

    def update_batch(self, step: int) -> UpdateResult:
        """Run the optimizer steps."""
        ...


class TrainerCommands:
    """One rank's handlers.

    Args:
        trainer: this rank's actor or critic.
        export: writes the model to a folder; runs on every rank.
        score: scores responses under the policy; runs on every rank. Answers them, on rank 0, and the policy version.
    """

    def __init__(
        self,
        trainer: Trainer,
        export: Callable[[str], ExportResult],
        score: Callable[[Sequence[TokenSequence]], tuple[list[TokenScores], int]],
    ) -> None:
        self._trainer = trainer
        self._export_model = export
        self._score_tokens = score

    def handlers(self) -> Mapping[str, Callable[[bytes], bytes]]:
        """The commands that a rank must be able to run."""
        return {
            FORWARD: self._forward,
            ADVANTAGES: self._advantages,
            UPDATE: self._update,
            SCORE: self._score,
            EXPORT: self._export,
        }

    def _forward(self, payload: bytes) -> bytes:
        request = trainer_pb2.ForwardBatchRequest.FromString(payload)
        metrics = self._trainer.forward_batch(batch_from_proto(request.batch))
        return trainer_pb2.ForwardBatchResponse(metrics=metrics).SerializeToString()

    def _advantages(self, payload: bytes) -> bytes:
        request = trainer_pb2.ComputeAdvantagesRequest.FromString(payload)
        metrics = self._trainer.compute_advantages(request.step, request.kl_coef, request.kl_loss_coef)
        return trainer_pb2.ComputeAdvantagesResponse(metrics=metrics).SerializeToString()

    def _update(self, payload: bytes) -> bytes:
        request = trainer_pb2.UpdateBatchRequest.FromString(payload)
        return update_result_to_proto(self._trainer.update_batch(request.step)).SerializeToString()

    def _score(self, payload: bytes) -> bytes:
        request = trainer_pb2.ScoreTokensRequest.FromString(payload)
        scores, policy_version = self._score_tokens([token_sequence_from_proto(sequence) for sequence in request.sequences])
        answer = trainer_pb2.ScoreTokensResponse(scores=[token_scores_to_proto(one) for one in scores], policy_version=policy_version)
        return answer.SerializeToString()

    def _export(self, payload: bytes) -> bytes:
        request = trainer_pb2.ExportModelRequest.FromString(payload)
        return export_result_to_proto(self._export_model(request.folder)).SerializeToString()
