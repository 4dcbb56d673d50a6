"""Experience records as Redis holds them, references to them, and batches. P prompt tokens, T response tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.codec.enums import finish_reason, score_status
from shoal.codec.reward import reward_component_from_proto, reward_component_to_proto
from shoal.codec.rollout import (
    check_spans,
    policy_version_span_from_proto,
    policy_version_span_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
)
from shoal.codec.tensor import numpy_dtype, parse, tensor_to_proto, vector_from_proto
from shoal.errors import CodecError
from shoal.rpc.v1 import experience_pb2
from shoal.types import EXPERIENCE_SCHEMA_VERSION, Batch, ExperienceRecord, MiniBatch, RecordRef, ScoreStatus


def record_to_bytes(record: ExperienceRecord) -> bytes:
    """Serialise a record for storage; equal records give equal bytes.

    Raises: CodecError: its arrays do not fit together.
    """
    return record_to_proto(record).SerializeToString(deterministic=True)


def record_from_bytes(data: bytes) -> ExperienceRecord:
    """Parse a stored record; its arrays are read-only.

    Raises: CodecError: not a record, another schema version, or arrays that do not fit together.
    """
    return record_from_proto(parse(experience_pb2.ExperienceRecord(), data))


def record_to_proto(record: ExperienceRecord) -> experience_pb2.ExperienceRecord:
    """Convert a record. Raises CodecError if its arrays do not fit together."""
    _check_record(record)
    return experience_pb2.ExperienceRecord(
        schema_version=EXPERIENCE_SCHEMA_VERSION,
        run_id=record.run_id,
        uid=record.uid,
        group_id=record.group_id,
        sample_index=record.sample_index,
        attempt=record.attempt,
        prompt_ids=tensor_to_proto(record.prompt_ids),
        response_ids=tensor_to_proto(record.response_ids),
        response_mask=tensor_to_proto(record.response_mask),
        rollout_logprobs=tensor_to_proto(record.rollout_logprobs),
        policy_version_spans=[policy_version_span_to_proto(span) for span in record.policy_version_spans],
        sampling=sampling_params_to_proto(record.sampling),
        finish_reason=finish_reason.to_proto(record.finish_reason),
        turns=record.turns,
        reward_status=score_status.to_proto(record.reward_status),
        reward=record.reward,
        reward_components=[reward_component_to_proto(component) for component in record.reward_components],
        token_rewards=None if record.token_rewards is None else tensor_to_proto(record.token_rewards),
        tokenizer_hash=record.tokenizer_hash,
        engine_id=record.engine_id,
        trace_id=record.trace_id,
        created_unix_ms=record.created_unix_ms,
        scored_unix_ms=record.scored_unix_ms,
        baseline_reward=record.baseline_reward,
        route_revision=record.route_revision,
    )


def record_from_proto(message: experience_pb2.ExperienceRecord) -> ExperienceRecord:
    """Convert a record. Raises CodecError for another schema version or arrays that do not fit together."""
    if message.schema_version != EXPERIENCE_SCHEMA_VERSION:
        raise CodecError(
            f"experience record has schema version {message.schema_version}, this version of Shoal reads {EXPERIENCE_SCHEMA_VERSION}; "
            "finish or discard the queue with the version that wrote it"
        )
    has_token_rewards = message.HasField("token_rewards")
    record = ExperienceRecord(
        run_id=message.run_id,
        uid=message.uid,
        group_id=message.group_id,
        sample_index=message.sample_index,
        attempt=message.attempt,
        prompt_ids=vector_from_proto(message.prompt_ids, "int32", "prompt_ids"),
        response_ids=vector_from_proto(message.response_ids, "int32", "response_ids"),
        response_mask=vector_from_proto(message.response_mask, "bool", "response_mask"),
        rollout_logprobs=vector_from_proto(message.rollout_logprobs, "float32", "rollout_logprobs"),
        policy_version_spans=tuple(policy_version_span_from_proto(span) for span in message.policy_version_spans),
        sampling=sampling_params_from_proto(message.sampling),
        finish_reason=finish_reason.from_proto(message.finish_reason),
        turns=message.turns,
        reward_status=score_status.from_proto(message.reward_status),
        reward=message.reward,
        reward_components=tuple(reward_component_from_proto(component) for component in message.reward_components),
        token_rewards=vector_from_proto(message.token_rewards, "float32", "token_rewards") if has_token_rewards else None,
        tokenizer_hash=message.tokenizer_hash,
        engine_id=message.engine_id,
        trace_id=message.trace_id,
        created_unix_ms=message.created_unix_ms,
        scored_unix_ms=message.scored_unix_ms,
        baseline_reward=message.baseline_reward if message.HasField("baseline_reward") else None,
        route_revision=message.route_revision,
    )
    _check_record(record)
    return record


def _check_record(record: ExperienceRecord) -> None:
    """Check dtypes, that every per-token array has T elements, and that a scored reward is finite."""
    name = f"record {record.uid}/{record.sample_index}/{record.attempt}"
    arrays: dict[str, tuple[NDArray[Any], str]] = {
        "response_ids": (record.response_ids, "int32"),
        "response_mask": (record.response_mask, "bool"),
        "rollout_logprobs": (record.rollout_logprobs, "float32"),
    }
    if record.token_rewards is not None:
        arrays["token_rewards"] = (record.token_rewards, "float32")
    num_tokens = len(record.response_ids)
    for what, (array, dtype) in arrays.items():
        if array.shape != (num_tokens,) or array.dtype != numpy_dtype(dtype):
            raise CodecError(f"{name}: {what} is {array.dtype.name}{list(array.shape)}; it must be {dtype}[{num_tokens}]")
    prompt_ids = record.prompt_ids
    if prompt_ids.ndim != 1 or prompt_ids.dtype != np.int32:
        raise CodecError(f"{name}: prompt_ids is {prompt_ids.dtype.name}{list(prompt_ids.shape)}; it must be a vector of int32")
    if record.reward_status is ScoreStatus.SCORED and not math.isfinite(record.reward):
        raise CodecError(f"{name}: reward is {record.reward}; a sample without a finite reward must not have the status scored")
    check_spans(record.policy_version_spans, num_tokens)


def record_ref_to_proto(ref: RecordRef) -> experience_pb2.RecordRef:
    """Convert a reference."""
    return experience_pb2.RecordRef(
        key=ref.key,
        group_id=ref.group_id,
        num_prompt_tokens=ref.num_prompt_tokens,
        num_response_tokens=ref.num_response_tokens,
        reward=ref.reward,
    )


def record_ref_from_proto(message: experience_pb2.RecordRef) -> RecordRef:
    """Convert a reference."""
    return RecordRef(
        key=message.key,
        group_id=message.group_id,
        num_prompt_tokens=message.num_prompt_tokens,
        num_response_tokens=message.num_response_tokens,
        reward=message.reward,
    )


def mini_batch_to_proto(mini_batch: MiniBatch) -> experience_pb2.MiniBatch:
    """Convert one rank's share of an optimizer step."""
    micro = [experience_pb2.MicroBatch(records=[record_ref_to_proto(ref) for ref in refs]) for refs in mini_batch.micro_batches]
    return experience_pb2.MiniBatch(micro_batches=micro)


def mini_batch_from_proto(message: experience_pb2.MiniBatch) -> MiniBatch:
    """Convert one rank's share of an optimizer step."""
    return MiniBatch(micro_batches=tuple(tuple(record_ref_from_proto(ref) for ref in micro.records) for micro in message.micro_batches))


def batch_to_proto(batch: Batch) -> experience_pb2.Batch:
    """Convert a batch. Raises CodecError if the ranks differ in mini- or micro-batches."""
    _check_batch(batch)
    ranks = [experience_pb2.RankBatch(mini_batches=[mini_batch_to_proto(mini) for mini in rank]) for rank in batch.ranks]
    return experience_pb2.Batch(run_id=batch.run_id, step=batch.step, ranks=ranks, batch_id=batch.batch_id)


def batch_from_proto(message: experience_pb2.Batch) -> Batch:
    """Convert a batch. Raises CodecError if the ranks differ in mini- or micro-batches."""
    ranks = tuple(tuple(mini_batch_from_proto(mini) for mini in rank.mini_batches) for rank in message.ranks)
    batch = Batch(run_id=message.run_id, step=message.step, ranks=ranks, batch_id=message.batch_id)
    _check_batch(batch)
    return batch


def batch_to_bytes(batch: Batch) -> bytes:
    """Serialise a batch, for example to send it to the other ranks of a gang."""
    return batch_to_proto(batch).SerializeToString()


def batch_from_bytes(data: bytes) -> Batch:
    """Parse what batch_to_bytes wrote. Raises CodecError if it is not a batch."""
    return batch_from_proto(parse(experience_pb2.Batch(), data))


def _check_batch(batch: Batch) -> None:
    # Unequal numbers would leave one rank waiting in a collective that the others never enter.
    shapes = [[len(mini.micro_batches) for mini in rank] for rank in batch.ranks]
    if any(shape != shapes[0] for shape in shapes):
        raise CodecError(f"batch of step {batch.step}: micro-batches per mini-batch differ between ranks ({shapes}); pad with empty ones")
