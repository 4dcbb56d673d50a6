"""Small experience records for tests."""

from __future__ import annotations

import numpy as np

from shoal.queue.experience import QueuedGroup
from shoal.types import ExperienceRecord, FinishReason, PolicyVersionSpan, RecordRef, SamplingParams, ScoreStatus


def make_record(
    uid: str = "e0-i0", sample_index: int = 0, *, run_id: str = "run", attempt: int = 0, reward: float = 1.0
) -> ExperienceRecord:
    """A record with 3 prompt tokens and sample_index + 1 response tokens."""
    num_tokens = sample_index + 1
    return ExperienceRecord(
        run_id=run_id,
        uid=uid,
        group_id=uid,
        sample_index=sample_index,
        attempt=attempt,
        prompt_ids=np.array([1, 5, 6], np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        response_mask=np.ones(num_tokens, np.bool_),
        rollout_logprobs=-np.ones(num_tokens, np.float32),
        policy_version_spans=(PolicyVersionSpan(policy_version=1, start=0, end=num_tokens),),
        sampling=SamplingParams(max_new_tokens=8),
        finish_reason=FinishReason.STOP,
        reward_status=ScoreStatus.SCORED,
        reward=reward,
    )


def make_group(uid: str, num_samples: int = 2, *, run_id: str = "run") -> list[ExperienceRecord]:
    """The records of one group."""
    return [make_record(uid, sample_index, run_id=run_id) for sample_index in range(num_samples)]


def make_queued(group_id: str, lengths: list[int], num_prompt_tokens: int = 3) -> QueuedGroup:
    """A group as taken from the queue; lengths are its response lengths in tokens."""
    refs = tuple(
        RecordRef(
            key=f"shoal:run:record:{group_id}:{index}:0",
            group_id=group_id,
            num_prompt_tokens=num_prompt_tokens,
            num_response_tokens=length,
            reward=0.5,
        )
        for index, length in enumerate(lengths)
    )
    return QueuedGroup(entry_id=f"{group_id}-0", group_id=group_id, refs=refs)
