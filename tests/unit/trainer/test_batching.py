"""Padding, masks and positions of a micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.inputs import pack_rows

from shoal.types import ExperienceRecord, FinishReason, ScoreStatus
from tests.helpers.trainer_bench import VOCAB_SIZE, make_record, ref_of
from tests.helpers.trainer_splits import component

ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def build(records: list[ExperienceRecord]) -> MicroBatch:
    return build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE)


def test_build_micro_batch_pads_right_and_leaves_out_the_last_token() -> None:
    short, long = make_record(0, num_prompt=2, num_response=3), make_record(1, num_prompt=4, num_response=5)
    micro = build([short, long])
    assert micro.inputs.input_ids.shape == (2, 8)
    assert micro.inputs.input_ids[0].tolist() == [*short.prompt_ids, *short.response_ids[:2], 0, 0, 0, 0]
    assert micro.response_ids[0].tolist() == [*short.response_ids, 0, 0]
    assert micro.valid.tolist() == [[True, True, True, False, False], [True] * 5]


def test_positions_before_points_at_the_token_before_each_response_token() -> None:
    record = make_record(0, num_prompt=4, num_response=3)
    micro = build([make_record(1, num_prompt=1, num_response=2), record])
    positions = micro.positions_before(micro.response_mask)
    width = micro.inputs.input_ids.shape[1]
    assert positions.tolist() == [0, 1, width + 3, width + 4, width + 5]
    before = micro.inputs.input_ids.flatten()[positions[-3:]]
    assert before.tolist() == [record.prompt_ids[-1], *record.response_ids[:2]]


def test_build_micro_batch_masks_untrained_tokens_and_puts_the_reward_on_the_last_trained_one() -> None:
    mask = np.array([True, True, False, True, False])
    micro = build([make_record(0, reward=2.5, response_mask=mask)])
    assert micro.response_mask.tolist() == [mask.tolist()]
    assert micro.scores.tolist() == [2.5]


def test_build_micro_batch_uses_token_rewards_as_given() -> None:
    rewards = np.array([0.1, 0.2, 0.3], np.float32)
    micro = build([make_record(0, num_response=3, token_rewards=rewards)])
    assert micro.token_rewards.tolist() == [rewards.tolist()]


@pytest.mark.parametrize(
    "changes",
    [
        {"reward_status": ScoreStatus.NOT_SCORED},
        {"reward_status": ScoreStatus.ERROR},
        {"reward": float("nan")},
        {"num_response": 0},
        {"num_prompt": 0},
        {"response_ids": np.array([1, VOCAB_SIZE, 2, 3, 4], np.int32)},
        {"prompt_ids": np.array([-1, 2, 3], np.int32)},
        {"rollout_logprobs": np.array([-1, np.nan, -1, -1, -1], np.float32)},
        {"token_rewards": np.array([1, 2, 3, np.inf, 5], np.float32)},
        {"token_rewards": np.array([1, 2, 3, 4], np.float32)},
    ],
)
def test_build_micro_batch_masks_and_counts_records_that_cannot_be_trained_on(changes: dict[str, object]) -> None:
    good = make_record(0, num_prompt=2, num_response=2)
    micro = build([good, make_record(1, **changes)])  # type: ignore[arg-type]
    assert micro.num_dropped == 1
    assert micro.response_mask.sum(dim=1).tolist() == [2, 0]
    assert micro.scores.isnan().tolist() == [False, True]
    assert micro.inputs.input_ids.max() < VOCAB_SIZE
    assert micro.inputs.input_ids.min() >= 0


def test_build_micro_batch_feeds_the_last_token_of_cut_responses_alone() -> None:
    ended, cut = (make_record(i, num_prompt=2, num_response=3 + i, finish_reason=reason) for i, reason in enumerate(ENDS))
    records, refs = [ended, cut], [ref_of(ended), ref_of(cut)]
    micro = build_micro_batch(refs, records, VOCAB_SIZE, layout=pack_rows, feed_cut_ends=True)
    assert micro.truncated.tolist() == [False, True]
    assert micro.inputs.input_ids.flatten().tolist() == [*ended.prompt_ids, *ended.response_ids[:-1], *cut.prompt_ids, *cut.response_ids]
    assert micro.positions_of_last(micro.truncated).tolist() == [9]
    assert build_micro_batch(refs, records, VOCAB_SIZE, layout=pack_rows).inputs.num_positions == 9


def test_loss_mask_leaves_out_cut_responses_if_asked_and_the_response_mask_never() -> None:
    micro = build([make_record(0, num_response=2), make_record(1, num_response=2, finish_reason=FinishReason.LENGTH)])
    assert micro.loss_mask(mask_truncated=True).tolist() == [[True, True], [False, False]]
    assert micro.loss_mask(mask_truncated=False).tolist() == micro.response_mask.tolist() == [[True, True], [True, True]]


def test_build_micro_batch_does_not_count_a_dropped_record_as_cut() -> None:
    micro = build([make_record(0, finish_reason=FinishReason.LENGTH, reward_status=ScoreStatus.ERROR)])
    assert micro.truncated.tolist() == [False]
    assert micro.num_dropped == 1


def test_build_micro_batch_reads_named_components_and_the_baseline() -> None:
    record = make_record(0, reward_components=(component("style", 0.5), component("correct", 1.0)), baseline_reward=0.25)
    micro = build_micro_batch([ref_of(record)] * 2, [record, make_record(1)], VOCAB_SIZE, component_names=("correct", "style"))
    assert micro.components[0].tolist() == [1.0, 0.5]
    assert micro.baselines[0] == 0.25
    assert micro.components[1].isnan().all()
    assert micro.baselines[1].isnan()


def test_build_micro_batch_gives_no_score_to_a_response_without_a_trained_token() -> None:
    micro = build([make_record(0, reward=3.0, response_mask=np.zeros(5, np.bool_))])
    assert micro.scores.isnan().tolist() == [True]
    assert micro.num_dropped == 0


def test_pad_column_refuses_a_column_of_another_length() -> None:
    micro = build([make_record(0, num_response=3)])
    assert micro.pad_column([np.array([1, 2, 3], np.float32)]).tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(ValueError, match="2 values for the 3"):
        micro.pad_column([np.array([1, 2], np.float32)])


def test_build_micro_batch_without_records_is_one_dummy_position_and_no_token() -> None:
    micro = build([])
    assert micro.inputs.input_ids.tolist() == [[0]]
    assert micro.response_mask.shape == (0, 1)
    assert micro.positions_before(micro.response_mask).tolist() == []


def test_pad_and_unpad_are_inverse_over_reported_lengths() -> None:
    records = [make_record(0, num_response=2), make_record(1, num_response=4)]
    micro = build(records)
    packed = torch.arange(1.0, 7.0)
    columns = micro.unpad(micro.pad(packed, micro.response_mask))
    assert [columns[ref_of(record).key].tolist() for record in records] == [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]
