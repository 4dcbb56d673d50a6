"""From the engine's answer to a Completion: exact ids, finite log-probabilities, version spans without gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.errors import InternalError
from shoal.types import Completion, FinishReason, PolicyVersionSpan
from shoal_rollout.engine import EngineSample

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def to_completion(sample: EngineSample, *, sample_index: int, latency_ms: float, engine_id: str) -> Completion:
    """Convert one answer.

    A response with a token that has no finite log-probability cannot be trained on, nor can its part before that: what came next was not
    sampled from the model's probabilities. It is answered without tokens and as LENGTH, which callers leave out and count; ABORT would
    have them ask again, and a model that overflows on a prompt does so each time. Whether that happened shows in `is_dropped`.

    Raises: InternalError: lengths differ, or tokens without a weight version.
    """
    if len(sample.logprobs) != len(sample.token_ids):
        raise InternalError(f"the engine gave {len(sample.token_ids)} tokens and {len(sample.logprobs)} log-probabilities")
    is_finite = all(map(math.isfinite, sample.logprobs))
    num_tokens = len(sample.token_ids) if is_finite else 0
    return Completion(
        sample_index=sample_index,
        response_ids=np.array(sample.token_ids[:num_tokens], dtype=np.int32),
        rollout_logprobs=np.array(sample.logprobs[:num_tokens], dtype=np.float32),
        finish_reason=_finish_reason(sample.finish_reason) if is_finite else FinishReason.LENGTH,
        policy_version_spans=version_spans(sample.versions, num_tokens),
        latency_ms=latency_ms,
        engine_id=engine_id,
    )


def is_dropped(sample: EngineSample, completion: Completion) -> bool:
    """Whether the response was left out for lack of a finite log-probability."""
    return len(completion.response_ids) < len(sample.token_ids)


def version_spans(versions: Sequence[tuple[str, int, int]] | None, num_tokens: int) -> tuple[PolicyVersionSpan, ...]:
    """Convert the engine's spans, merged and cut to `num_tokens`.

    Raises: InternalError: they do not cover [0, num_tokens), or a version is not a number.
    """
    spans: list[PolicyVersionSpan] = []
    for version, start, end in versions or ():
        end = min(end, num_tokens)
        if end <= start:
            continue
        if not version.isdigit() or start != (spans[-1].end if spans else 0):
            break
        spans.append(PolicyVersionSpan(policy_version=int(version), start=start, end=end))
    if (spans[-1].end if spans else 0) != num_tokens:
        raise InternalError(f"the engine's weight versions {list(versions or ())} do not cover {num_tokens} tokens")
    return tuple(spans)


def _finish_reason(reason: str) -> FinishReason:
    if reason not in _FINISH_REASONS:
        raise InternalError(f"the engine ended a sample with the unknown reason {reason!r}")
    return _FINISH_REASONS[reason]
