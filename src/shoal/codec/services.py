"""What the registry and the trainer gangs say about themselves."""

from __future__ import annotations

from shoal.codec.enums import service_kind, trainer_role
from shoal.errors import CodecError
from shoal.rpc.v1 import registry_pb2, trainer_pb2
from shoal.types import ExportResult, ServiceInfo, TokenScores, TokenSequence, TrainerDescription, UpdateResult


def service_info_to_proto(service: ServiceInfo) -> registry_pb2.RegisterRequest:
    """Convert a registration."""
    return registry_pb2.RegisterRequest(
        run_id=service.run_id,
        service_id=service.service_id,
        kind=service_kind.to_proto(service.kind),
        address=service.address,
        incarnation=service.incarnation,
        policy_version=service.policy_version,
        process_id=service.process_id,
    )


def service_info_from_proto(message: registry_pb2.RegisterRequest) -> ServiceInfo:
    """Convert a registration. Raises CodecError if the kind is not set."""
    return ServiceInfo(
        run_id=message.run_id,
        service_id=message.service_id,
        kind=service_kind.from_proto(message.kind),
        address=message.address,
        incarnation=message.incarnation,
        policy_version=message.policy_version,
        process_id=message.process_id,
    )


def trainer_description_to_proto(description: TrainerDescription) -> trainer_pb2.DescribeTrainerResponse:
    """Convert a gang's description."""
    return trainer_pb2.DescribeTrainerResponse(
        service_id=description.service_id,
        role=trainer_role.to_proto(description.role),
        world_size=description.world_size,
        num_parameters=description.num_parameters,
        step=description.step,
        has_reference=description.has_reference,
    )


def trainer_description_from_proto(message: trainer_pb2.DescribeTrainerResponse) -> TrainerDescription:
    """Convert a gang's description. Raises CodecError if the role is not set."""
    return TrainerDescription(
        service_id=message.service_id,
        role=trainer_role.from_proto(message.role),
        world_size=message.world_size,
        num_parameters=message.num_parameters,
        step=message.step,
        has_reference=message.has_reference,
    )


def update_result_to_proto(result: UpdateResult) -> trainer_pb2.UpdateBatchResponse:
    """Convert the answer of an update; metrics may hold NaN."""
    return trainer_pb2.UpdateBatchResponse(policy_version=result.policy_version, applied=result.applied, metrics=result.metrics)


def update_result_from_proto(message: trainer_pb2.UpdateBatchResponse) -> UpdateResult:
    """Convert the answer of an update."""
    return UpdateResult(policy_version=message.policy_version, applied=message.applied, metrics=dict(message.metrics))


def export_result_to_proto(result: ExportResult) -> trainer_pb2.ExportModelResponse:
    """Convert the answer of an export."""
    return trainer_pb2.ExportModelResponse(folder=result.folder, policy_version=result.policy_version, num_bytes=result.num_bytes)


def export_result_from_proto(message: trainer_pb2.ExportModelResponse) -> ExportResult:
    """Convert the answer of an export."""
    return ExportResult(folder=message.folder, policy_version=message.policy_version, num_bytes=message.num_bytes)


def token_sequence_to_proto(sequence: TokenSequence) -> trainer_pb2.TokenSequence:
    """Convert a prompt and a response to be scored."""
    return trainer_pb2.TokenSequence(prompt_ids=sequence.prompt_ids, response_ids=sequence.response_ids)


def token_sequence_from_proto(message: trainer_pb2.TokenSequence) -> TokenSequence:
    """Convert a prompt and a response to be scored. Raises CodecError without a prompt token, or for a negative id."""
    sequence = TokenSequence(prompt_ids=tuple(message.prompt_ids), response_ids=tuple(message.response_ids))
    if not sequence.prompt_ids or min(*sequence.prompt_ids, *sequence.response_ids, 0) < 0:
        raise CodecError(
            f"prompt_ids {list(sequence.prompt_ids[:8])} and response_ids {list(sequence.response_ids[:8])} cannot be scored; "
            "give at least one prompt token, and ids >= 0"
        )
    return sequence


def token_scores_to_proto(scores: TokenScores) -> trainer_pb2.TokenScores:
    """Convert the scores of one response. Raises CodecError unless every token has both."""
    _check_scores(scores)
    return trainer_pb2.TokenScores(logprobs=scores.logprobs, greedy_ids=scores.greedy_ids)


def token_scores_from_proto(message: trainer_pb2.TokenScores) -> TokenScores:
    """Convert the scores of one response. Raises CodecError unless every token has both."""
    scores = TokenScores(logprobs=tuple(message.logprobs), greedy_ids=tuple(message.greedy_ids))
    _check_scores(scores)
    return scores


def _check_scores(scores: TokenScores) -> None:
    if len(scores.logprobs) != len(scores.greedy_ids):
        raise CodecError(f"{len(scores.logprobs)} logprobs but {len(scores.greedy_ids)} greedy_ids; give one of each per response token")
