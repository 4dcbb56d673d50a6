"""Samples, scores, records and batches as they cross module borders inside a process.

Legend: T response tokens, P prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ScoreStatus(StrEnum):
    """Whether a scorer gave a score. Only SCORED reaches an advantage."""

    SCORED = "scored"
    NOT_SCORED = "not_scored"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine samples. temperature 0 is greedy (evaluation only)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersionSpan:
    """Response tokens [start, end) were sampled by policy_version."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion: exactly the ids the engine sampled.

    response_ids: [T] int32. rollout_logprobs: [T] float32, after temperature.
    policy_version_spans covers [0, T) without gaps.
    """

    sample_index: int
    response_ids: Int32Array
    rollout_logprobs: Float32Array
    finish_reason: FinishReason
    policy_version_spans: tuple[PolicyVersionSpan, ...]
    latency_ms: float
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSample:
    """One response to score. row holds the data row (answer columns and so on).

    prompt_ids, response_ids: the policy's own ids; empty unless the scorer's description says that it needs them.
    """

    sample_id: str
    prompt: str
    response: str
    row: dict[str, object]
    finish_reason: FinishReason
    num_response_tokens: int
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A scorer's answer for one sample; value and components are meaningful only if status is SCORED."""

    sample_id: str
    status: ScoreStatus
    value: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    token_values: tuple[float, ...] = ()
    message: str = ""
    latency_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent:
    """A named part of a reward: name within scorer, the reward server that gave it, the scorer's version."""

    name: str
    service: str
    service_version: str
    value: float
    status: ScoreStatus
    latency_ms: float
    scorer: str = ""


EXPERIENCE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceRecord:
    """One scored sample as stored in Redis.

    prompt_ids: [P] int32. response_ids: [T] int32. response_mask: [T] bool, True = trained.
    rollout_logprobs: [T] float32. token_rewards: [T] float32 or None for an outcome reward.
    baseline_reward: reward of the prompt's greedy answer; None where no estimator needs it.
    route_revision: revision of the reward route that scored the whole group; 0 where none is known.
    Key: (uid, sample_index, attempt).
    """

    run_id: str
    uid: str
    group_id: str
    sample_index: int
    attempt: int
    prompt_ids: Int32Array
    response_ids: Int32Array
    response_mask: BoolArray
    rollout_logprobs: Float32Array
    policy_version_spans: tuple[PolicyVersionSpan, ...]
    sampling: SamplingParams
    finish_reason: FinishReason
    reward_status: ScoreStatus
    reward: float
    reward_components: tuple[RewardComponent, ...] = ()
    token_rewards: Float32Array | None = None
    baseline_reward: float | None = None
    route_revision: int = 0
    turns: int = 1
    tokenizer_hash: str = ""
    engine_id: str = ""
    trace_id: str = ""
    created_unix_ms: int = 0
    scored_unix_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRef:
    """Points at one record in Redis without its tokens."""

    key: str
    group_id: str
    num_prompt_tokens: int
    num_response_tokens: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One optimizer step of one rank: micro-batches of records; an empty micro-batch has weight 0."""

    micro_batches: tuple[tuple[RecordRef, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The records of one training step, split over ranks.

    ranks[r] is rank r's mini-batches. All ranks have equally many mini-batches and, per mini-batch, equally many micro-batches.
    batch_id tells a repeated command from a batch of equal records that was put together again, whose columns are not written yet.
    """

    run_id: str
    step: int
    ranks: tuple[tuple[MiniBatch, ...], ...]
    batch_id: str = ""
