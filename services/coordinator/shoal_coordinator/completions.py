"""What of a server's answer can be trained on.

Legend: T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import InternalError, StalePolicyError
from shoal.types import Completion, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedCompletions:
    """Usable completions by sample_index, and how many of each other kind there were.

    num_empty: without a token. num_outside_vocab: with an id that cannot be sampled. num_not_finite: with a log-probability that
    is no finite number, so that no ratio could be formed.
    """

    usable: tuple[Completion, ...]
    num_empty: int = 0
    num_outside_vocab: int = 0
    num_not_finite: int = 0


def sort_completions(completions: Sequence[Completion], vocab_size: int) -> SortedCompletions:
    """Set aside what cannot be trained on.

    Args:
        completions: as a server answered them, checked by `require_whole`.
        vocab_size: sampled ids are below it.
    """
    usable: list[Completion] = []
    num_empty = num_outside_vocab = num_not_finite = 0
    for completion in sorted(completions, key=lambda completion: completion.sample_index):
        ids = completion.response_ids
        if not ids.size:
            num_empty += 1
        elif int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            num_outside_vocab += 1
        elif not np.isfinite(completion.rollout_logprobs).all():
            num_not_finite += 1
        else:
            usable.append(completion)
    return SortedCompletions(usable=tuple(usable), num_empty=num_empty, num_outside_vocab=num_outside_vocab, num_not_finite=num_not_finite)


def require_whole(completions: Sequence[Completion], server_id: str) -> None:
    """Refuse an answer whose parts do not fit together.

    Raises: InternalError: names the server.
    """
    if any(completion.response_ids.size != completion.rollout_logprobs.size for completion in completions):
        raise InternalError(f"rollout server {server_id!r} answered another number of log-probabilities than of tokens")


def require_fresh(completion: Completion, min_policy_version: int) -> None:
    """Refuse tokens of an older policy than was asked for.

    Raises: StalePolicyError: names both versions.
    """
    versions = [span.policy_version for span in completion.policy_version_spans if span.end > span.start]
    oldest = min(versions, default=min_policy_version)
    if oldest < min_policy_version:
        raise StalePolicyError(f"a sample has tokens of policy version {oldest}, but at least version {min_policy_version} was asked for")


def is_aborted(completion: Completion) -> bool:
    """Whether the server ended it early."""
    return completion.finish_reason is FinishReason.ABORT
