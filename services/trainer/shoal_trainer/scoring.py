"""Scores given responses under the policy as it is; nothing of a running step changes.

Legend: B sequences of a pass, L input positions, N response tokens of a pass.

Every rank runs the same passes over the same sequences, since FSDP gathers parameters on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.config.models import MAX_SCORED_SEQUENCES
from shoal.errors import InvalidRequestError
from shoal.types import TokenScores, TokenSequence
from shoal_trainer.inputs import Layout, ModelInputs
from shoal_trainer.models import PolicyModel, layout_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """What a request may hold. max_tokens: prompt and response of a sequence; pass_tokens: padded positions of a pass."""

    vocab_size: int
    max_tokens: int
    pass_tokens: int


def score_sequences(
    policy: PolicyModel, sequences: Sequence[TokenSequence], limits: ScoringLimits, device: torch.device
) -> list[TokenScores]:
    """Log-probability at temperature 1 of every response token, and the greedy choice there; the same on every rank.

    Raises: InvalidRequestError: more than `limits` allow, no prompt, or an id outside the vocabulary.
    """
    _check(sequences, limits)
    scores: dict[int, TokenScores] = {}
    with torch.no_grad():
        for rows in _passes([_input_length(sequence) for sequence in sequences], limits.pass_tokens):
            scores |= zip(rows, _score_pass(policy, [sequences[row] for row in rows], device), strict=True)
    return [scores[row] for row in range(len(sequences))]


def _score_pass(policy: PolicyModel, sequences: Sequence[TokenSequence], device: torch.device) -> list[TokenScores]:
    lengths = [len(sequence.response_ids) for sequence in sequences]
    inputs, positions, token_ids = _inputs(sequences, layout_for(policy))
    logprobs, greedy_ids = policy.score(inputs.to(device), positions.to(device), token_ids.to(device))
    return [
        TokenScores(logprobs=tuple(of_row.tolist()), greedy_ids=tuple(ids_of_row.tolist()))
        for of_row, ids_of_row in zip(torch.split(logprobs.float(), lengths), torch.split(greedy_ids, lengths), strict=True)
    ]


def _inputs(sequences: Sequence[TokenSequence], layout: Layout) -> tuple[ModelInputs, Tensor, Tensor]:
    """The input; flat positions before each response token, and these tokens, [N] each."""
    ids = [[*sequence.prompt_ids, *sequence.response_ids][: _input_length(sequence)] for sequence in sequences]
    inputs = layout([np.array(row, np.int32) for row in ids])
    positions: list[int] = []
    token_ids: list[int] = []
    for sequence, first in zip(sequences, inputs.starts.tolist(), strict=True):
        start = first + len(sequence.prompt_ids) - 1
        positions.extend(range(start, start + len(sequence.response_ids)))
        token_ids.extend(sequence.response_ids)
    return inputs, torch.tensor(positions, dtype=torch.int64), torch.tensor(token_ids, dtype=torch.int64)


def _passes(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Cut the sequences into passes of similar length; a sequence that is too long for a pass gets its own."""
    passes: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not passes or (len(passes[-1]) + 1) * width > pass_tokens:
            passes.append([])
            width = lengths[row]
        passes[-1].append(row)
    return passes


def _input_length(sequence: TokenSequence) -> int:
    """The last response token is not fed in: nothing follows it."""
    return len(sequence.prompt_ids) + max(len(sequence.response_ids) - 1, 0)


def _check(sequences: Sequence[TokenSequence], limits: ScoringLimits) -> None:
    if len(sequences) > MAX_SCORED_SEQUENCES:
        raise InvalidRequestError(f"{len(sequences)} sequences are to be scored; send at most {MAX_SCORED_SEQUENCES} at once")
    for index, sequence in enumerate(sequences):
        if not sequence.prompt_ids:
            raise InvalidRequestError(f"sequence {index} has no prompt; give at least one prompt token")
        num_tokens = len(sequence.prompt_ids) + len(sequence.response_ids)
        if num_tokens > limits.max_tokens:
            raise InvalidRequestError(
                f"sequence {index} has {num_tokens} tokens; data.max_prompt_tokens and rollout.max_new_tokens allow {limits.max_tokens}"
            )
        ids = (*sequence.prompt_ids, *sequence.response_ids)
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise InvalidRequestError(
                f"sequence {index} has id {min(ids) if min(ids) < 0 else max(ids)}; ids are in [0, {limits.vocab_size})"
            )
