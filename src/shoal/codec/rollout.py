"""Sampling parameters, completions and rollout servers. T response tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.codec.enums import finish_reason
from shoal.codec.tensor import dtype_from_proto, dtype_to_proto
from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2, rollout_pb2
from shoal.types import Completion, PolicyVersionSpan, RolloutDescription, SamplingParams


def sampling_params_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Convert sampling parameters."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def sampling_params_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert sampling parameters; their values are the engine's to judge."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        max_new_tokens=message.max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def policy_version_span_to_proto(span: PolicyVersionSpan) -> common_pb2.PolicyVersionSpan:
    """Convert one span."""
    return common_pb2.PolicyVersionSpan(policy_version=span.policy_version, start=span.start, end=span.end)


def policy_version_span_from_proto(message: common_pb2.PolicyVersionSpan) -> PolicyVersionSpan:
    """Convert one span."""
    return PolicyVersionSpan(policy_version=message.policy_version, start=message.start, end=message.end)


def check_spans(spans: Sequence[PolicyVersionSpan], num_tokens: int) -> None:
    """Check that spans cover [0, num_tokens) in order, without gaps or empty spans.

    Raises: CodecError: they do not.
    """
    start = 0
    for span in spans:
        if span.start != start or span.end <= span.start:
            break
        start = span.end
    else:
        if start == num_tokens:
            return
    shown = [(span.start, span.end) for span in spans[:8]]
    raise CodecError(f"policy version spans {shown} do not cover [0, {num_tokens}); every response token needs exactly one version")


def completion_to_proto(completion: Completion) -> rollout_pb2.GenerateResponse:
    """Convert one completion.

    Raises: CodecError: ids, log-probabilities and spans differ in length.
    """
    _check_completion(completion)
    return rollout_pb2.GenerateResponse(
        sample_index=completion.sample_index,
        response_ids=completion.response_ids.tolist(),
        rollout_logprobs=completion.rollout_logprobs.tolist(),
        finish_reason=finish_reason.to_proto(completion.finish_reason),
        policy_version_spans=[policy_version_span_to_proto(span) for span in completion.policy_version_spans],
        latency_ms=completion.latency_ms,
        engine_id=completion.engine_id,
    )


def completion_from_proto(message: rollout_pb2.GenerateResponse) -> Completion:
    """Convert one completion.

    Raises: CodecError: ids, log-probabilities and spans differ in length, or the finish reason is not set.
    """
    completion = Completion(
        sample_index=message.sample_index,
        response_ids=np.array(message.response_ids, dtype=np.int32),
        rollout_logprobs=np.array(message.rollout_logprobs, dtype=np.float32),
        finish_reason=finish_reason.from_proto(message.finish_reason),
        policy_version_spans=tuple(policy_version_span_from_proto(span) for span in message.policy_version_spans),
        latency_ms=message.latency_ms,
        engine_id=message.engine_id,
    )
    _check_completion(completion)
    return completion


def _check_completion(completion: Completion) -> None:
    num_tokens = len(completion.response_ids)
    if len(completion.rollout_logprobs) != num_tokens:
        raise CodecError(
            f"completion {completion.sample_index} has {num_tokens} response_ids but {len(completion.rollout_logprobs)} rollout_logprobs; "
            "the engine must report one log-probability per token"
        )
    check_spans(completion.policy_version_spans, num_tokens)


def rollout_description_to_proto(description: RolloutDescription) -> rollout_pb2.DescribeRolloutResponse:
    """Convert a server's description."""
    return rollout_pb2.DescribeRolloutResponse(
        service_id=description.service_id,
        model=description.model,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        tensor_parallel_size=description.tensor_parallel_size,
        weight_dtype=dtype_to_proto(description.weight_dtype),
        policy_version=description.policy_version,
        num_running=description.num_running,
        draining=description.draining,
    )


def rollout_description_from_proto(message: rollout_pb2.DescribeRolloutResponse) -> RolloutDescription:
    """Convert a server's description. Raises CodecError for an unknown dtype."""
    return RolloutDescription(
        service_id=message.service_id,
        model=message.model,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        tensor_parallel_size=message.tensor_parallel_size,
        weight_dtype=dtype_from_proto(message.weight_dtype),
        policy_version=message.policy_version,
        num_running=message.num_running,
        draining=message.draining,
    )
