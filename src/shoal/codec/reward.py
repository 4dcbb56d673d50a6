"""Samples to score, scores and scorers."""

from __future__ import annotations

import json
import math

from shoal.codec.enums import finish_reason, score_status
from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2, reward_pb2
from shoal.types import RewardComponent, ScorerDescription, ScoreResult, ScoreSample, ScoreStatus


def score_sample_to_proto(sample: ScoreSample) -> reward_pb2.ScoreSample:
    """Convert one sample; its row travels as JSON.

    Raises: CodecError: the row holds something JSON cannot carry, or a text is no Unicode.
    """
    row_json = _row_json(sample)
    try:
        return reward_pb2.ScoreSample(
            sample_id=sample.sample_id,
            prompt=sample.prompt,
            response=sample.response,
            row_json=row_json,
            finish_reason=finish_reason.to_proto(sample.finish_reason),
            num_response_tokens=sample.num_response_tokens,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
        )
    except ValueError as error:
        raise CodecError(f"sample {sample.sample_id!r} cannot be sent: {error}") from error


def _row_json(sample: ScoreSample) -> str:
    try:
        row_json = json.dumps(sample.row, ensure_ascii=False)
        # A lone surrogate, which JSON can hold and UTF-8 cannot, travels as an escape.
        return row_json if _is_utf8(row_json) else json.dumps(sample.row)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"row of sample {sample.sample_id} is not JSON ({error}); use strings, numbers, lists and objects") from error


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def score_sample_from_proto(message: reward_pb2.ScoreSample) -> ScoreSample:
    """Convert one sample; an empty row_json is an empty row.

    Raises: CodecError: row_json is not a JSON object, or the finish reason is not set.
    """
    return ScoreSample(
        sample_id=message.sample_id,
        prompt=message.prompt,
        response=message.response,
        row=_row(message),
        finish_reason=finish_reason.from_proto(message.finish_reason),
        num_response_tokens=message.num_response_tokens,
        prompt_ids=tuple(message.prompt_ids),
        response_ids=tuple(message.response_ids),
    )


def _row(message: reward_pb2.ScoreSample) -> dict[str, object]:
    if not message.row_json:
        return {}
    try:
        row = json.loads(message.row_json)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"row_json of sample {message.sample_id} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CodecError(f"row_json of sample {message.sample_id} is a {type(row).__name__}; it must be an object")
    return row


def score_result_to_proto(result: ScoreResult) -> reward_pb2.ScoreResult:
    """Convert one result.

    Raises: CodecError: it is SCORED with a value, component or token value that is not finite.
    """
    _check_finite(result)
    return reward_pb2.ScoreResult(
        sample_id=result.sample_id,
        status=score_status.to_proto(result.status),
        value=result.value,
        components=result.components,
        token_values=result.token_values,
        message=result.message,
        latency_ms=result.latency_ms,
    )


def score_result_from_proto(message: reward_pb2.ScoreResult) -> ScoreResult:
    """Convert one result.

    Raises: CodecError: the status is not set, or it is SCORED with a value that is not finite.
    """
    result = ScoreResult(
        sample_id=message.sample_id,
        status=score_status.from_proto(message.status),
        value=message.value,
        components=dict(message.components),
        token_values=tuple(message.token_values),
        message=message.message,
        latency_ms=message.latency_ms,
    )
    _check_finite(result)
    return result


def _check_finite(result: ScoreResult) -> None:
    if result.status is not ScoreStatus.SCORED:
        return
    values = {"value": result.value, **result.components} | {f"token {i}": value for i, value in enumerate(result.token_values)}
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if bad:
        raise CodecError(f"score of sample {result.sample_id} is not finite ({bad}); report it with status error")


def reward_component_to_proto(component: RewardComponent) -> common_pb2.RewardComponent:
    """Convert one named part of a reward."""
    return common_pb2.RewardComponent(
        name=component.name,
        service=component.service,
        service_version=component.service_version,
        value=component.value,
        status=score_status.to_proto(component.status),
        latency_ms=component.latency_ms,
        scorer=component.scorer,
    )


def reward_component_from_proto(message: common_pb2.RewardComponent) -> RewardComponent:
    """Convert one named part of a reward. Raises CodecError if the status is not set."""
    return RewardComponent(
        name=message.name,
        service=message.service,
        service_version=message.service_version,
        value=message.value,
        status=score_status.from_proto(message.status),
        latency_ms=message.latency_ms,
        scorer=message.scorer,
    )


def scorer_description_to_proto(scorer: ScorerDescription) -> reward_pb2.ScorerDescription:
    """Convert a scorer's description."""
    return reward_pb2.ScorerDescription(
        name=scorer.name,
        version=scorer.version,
        description=scorer.description,
        fingerprint=scorer.fingerprint,
        needs_token_ids=scorer.needs_token_ids,
    )


def scorer_description_from_proto(message: reward_pb2.ScorerDescription) -> ScorerDescription:
    """Convert a scorer's description."""
    return ScorerDescription(
        name=message.name,
        version=message.version,
        description=message.description,
        fingerprint=message.fingerprint,
        needs_token_ids=message.needs_token_ids,
    )
