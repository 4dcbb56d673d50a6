"""What the codecs refuse, with the value in the message."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shoal.codec.enums import finish_reason, inflight_mode, score_status, service_kind, trainer_role
from shoal.codec.experience import (
    batch_from_bytes,
    batch_to_bytes,
    batch_to_proto,
    record_from_bytes,
    record_from_proto,
    record_to_bytes,
    record_to_proto,
)
from shoal.codec.reward import score_result_from_proto, score_result_to_proto, score_sample_from_proto, score_sample_to_proto
from shoal.codec.rollout import check_spans, completion_from_proto, completion_to_proto
from shoal.codec.tensor import tensor_to_proto
from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2, experience_pb2, reward_pb2, rollout_pb2
from shoal.types import Batch, FinishReason, MiniBatch, PolicyVersionSpan, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.codec_values import COMPLETION, EXAMPLES, RECORD, REF, same


def test_record_bytes_round_trip_and_are_deterministic() -> None:
    data = record_to_bytes(RECORD)
    assert same(record_from_bytes(data), RECORD)
    assert record_to_bytes(record_from_bytes(data)) == data


def test_record_without_token_rewards_stays_without() -> None:
    record = dataclasses.replace(RECORD, token_rewards=None)
    assert record_from_bytes(record_to_bytes(record)).token_rewards is None


def test_record_empty_response_with_empty_token_rewards_keeps_both() -> None:
    empty = np.zeros(0, np.float32)
    record = dataclasses.replace(
        RECORD,
        response_ids=np.zeros(0, np.int32),
        response_mask=np.zeros(0, np.bool_),
        rollout_logprobs=empty,
        token_rewards=empty,
        policy_version_spans=(),
    )
    assert same(record_from_bytes(record_to_bytes(record)), record)


@pytest.mark.parametrize("version", [0, 2, -1])
def test_record_other_schema_version_is_refused(version: int) -> None:
    message = record_to_proto(RECORD)
    message.schema_version = version
    with pytest.raises(CodecError, match=f"schema version {version}, .* reads 1"):
        record_from_bytes(message.SerializeToString())


@pytest.mark.parametrize("data", [b"\xff", b"not a record at all"])
def test_record_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match="ExperienceRecord"):
        record_from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_mask", np.array([True, False])),
        ("response_mask", np.array([1, 0, 1], np.int32)),
        ("rollout_logprobs", np.zeros(4, np.float32)),
        ("rollout_logprobs", np.zeros(3, np.float64)),
        ("token_rewards", np.zeros((3, 1), np.float32)),
        ("prompt_ids", np.zeros(2, np.int64)),
        ("prompt_ids", np.zeros((1, 2), np.int32)),
        ("response_ids", np.zeros(3, np.int64)),
    ],
)
def test_record_arrays_that_do_not_fit_are_refused_both_ways(field: str, value: Any) -> None:  # noqa: ANN401 - one field of many types
    with pytest.raises(CodecError, match=field):
        record_to_bytes(dataclasses.replace(RECORD, **{field: value}))
    message = record_to_proto(RECORD)
    getattr(message, field).CopyFrom(tensor_to_proto(value))
    with pytest.raises(CodecError, match=field):
        record_from_proto(message)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_record_scored_reward_must_be_finite(reward: float) -> None:
    with pytest.raises(CodecError, match=f"reward is {reward}"):
        record_to_bytes(dataclasses.replace(RECORD, reward=reward))
    unscored = dataclasses.replace(RECORD, reward=reward, reward_status=ScoreStatus.ERROR)
    assert record_from_bytes(record_to_bytes(unscored)).reward_status is ScoreStatus.ERROR


@pytest.mark.parametrize(
    "spans",
    [[], [(0, 2)], [(0, 4)], [(1, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 0), (0, 3)], [(1, 3), (0, 1)], [(0, 3), (3, 3)]],
)
def test_spans_with_gaps_overlaps_or_wrong_ends_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(CodecError, match=r"do not cover \[0, 3\)"):
        check_spans([PolicyVersionSpan(policy_version=1, start=start, end=end) for start, end in spans], 3)


def test_spans_of_an_empty_response_are_empty() -> None:
    check_spans((), 0)
    with pytest.raises(CodecError):
        check_spans([PolicyVersionSpan(policy_version=1, start=0, end=1)], 0)


def test_completion_with_missing_logprobs_is_refused_both_ways() -> None:
    with pytest.raises(CodecError, match="3 response_ids but 2 rollout_logprobs"):
        completion_to_proto(dataclasses.replace(COMPLETION, rollout_logprobs=np.zeros(2, np.float32)))
    message = completion_to_proto(COMPLETION)
    message.rollout_logprobs.pop()
    with pytest.raises(CodecError, match="3 response_ids but 2 rollout_logprobs"):
        completion_from_proto(message)


def test_completion_without_finish_reason_is_refused() -> None:
    with pytest.raises(CodecError, match="finish_reason 0 is unknown"):
        completion_from_proto(rollout_pb2.GenerateResponse())


@pytest.mark.parametrize("codec", [finish_reason, inflight_mode, score_status, service_kind, trainer_role])
@pytest.mark.parametrize("number", [0, 99])
def test_enum_unspecified_and_unknown_numbers_are_refused(codec: Any, number: int) -> None:  # noqa: ANN401 - one generic class each
    with pytest.raises(CodecError, match=f"{number} is unknown"):
        codec.from_proto(number)


def test_batch_bytes_round_trip() -> None:
    _, batch = EXAMPLES["batch"]
    assert batch_from_bytes(batch_to_bytes(batch)) == batch


def test_batch_with_unequal_ranks_is_refused() -> None:
    one, two = MiniBatch(micro_batches=((REF,),)), MiniBatch(micro_batches=((REF,), ()))
    for ranks in (((one,), (two,)), ((one,), (one, one)), ((one,), ())):
        with pytest.raises(CodecError, match="differ between ranks"):
            batch_to_proto(Batch(run_id="r", step=1, ranks=ranks))
    message = batch_to_proto(Batch(run_id="r", step=1, ranks=((one,), (one,))))
    message.ranks[1].mini_batches[0].micro_batches.append(experience_pb2.MicroBatch())
    with pytest.raises(CodecError, match="differ between ranks"):
        batch_from_bytes(message.SerializeToString())


@pytest.mark.parametrize(
    "result",
    [
        ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=float("nan")),
        ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.0, components={"a": float("inf")}),
        ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.0, token_values=(1.0, float("-inf"))),
    ],
)
def test_score_that_is_not_finite_is_refused(result: ScoreResult) -> None:
    with pytest.raises(CodecError, match="sample s is not finite"):
        score_result_to_proto(result)
    message = reward_pb2.ScoreResult(sample_id="s", status=common_pb2.SCORE_STATUS_SCORED, value=result.value)
    message.components.update(result.components)
    message.token_values.extend(result.token_values)
    with pytest.raises(CodecError, match="sample s is not finite"):
        score_result_from_proto(message)
    # Without a score the value means nothing, so it is no reason to fail the whole group.
    assert score_result_to_proto(dataclasses.replace(result, status=ScoreStatus.ERROR)).sample_id == "s"


@pytest.mark.parametrize(("row_json", "message"), [("{", "not JSON"), ("[1]", "is a list"), ("3", "is a int"), ("[" * 100_000, "not JSON")])
def test_score_sample_row_must_be_a_json_object(row_json: str, message: str) -> None:
    with pytest.raises(CodecError, match=f"sample s.*{message}|{message}"):
        score_sample_from_proto(reward_pb2.ScoreSample(sample_id="s", row_json=row_json, finish_reason=common_pb2.FINISH_REASON_STOP))


def test_score_sample_row_that_json_cannot_carry_is_refused() -> None:
    _, example = EXAMPLES["score_sample"]
    sample: ScoreSample = dataclasses.replace(example, row={"x": object()})
    with pytest.raises(CodecError, match="row of sample u/0/1 is not JSON"):
        score_sample_to_proto(sample)


_SAMPLE = ScoreSample(sample_id="u/0/0", prompt="p", response="r", row={}, finish_reason=FinishReason.STOP, num_response_tokens=1)


def test_score_sample_row_with_a_lone_surrogate_travels_as_it_is() -> None:
    row: dict[str, object] = {"answer": "a\ud800ü", "plain": "ü"}
    sample = dataclasses.replace(_SAMPLE, row=row)
    data = score_sample_to_proto(sample).SerializeToString()
    assert score_sample_from_proto(reward_pb2.ScoreSample.FromString(data)).row == row


@pytest.mark.parametrize("sample", [dataclasses.replace(_SAMPLE, prompt="\udcff"), dataclasses.replace(_SAMPLE, response="\udcff")])
def test_score_sample_text_that_is_no_unicode_is_refused(sample: ScoreSample) -> None:
    with pytest.raises(CodecError, match="sample 'u/0/0' cannot be sent"):
        score_sample_to_proto(sample)
