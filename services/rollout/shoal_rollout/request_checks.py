"""Checks of a Generate request before it reaches the engine, which some of these faults would kill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InvalidRequestError
from shoal.types import SamplingParams

MAX_SAMPLES_PER_REQUEST = 4096
MAX_TEMPERATURE = 2.0
_MIN_TEMPERATURE = 1e-2
"""Below this the engine silently samples at another temperature (or greedily), so its log-probabilities would not be the asked ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One Generate request as this process sees it. prompt_ids: [P]; seeds: one per sample, or ()."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    num_samples: int
    seeds: tuple[int, ...] = ()
    min_policy_version: int = 0


def check_call(call: GenerateCall, *, vocab_size: int, max_model_len: int) -> None:
    """Check everything that the engine would choke on.

    Args:
        vocab_size: Ids below this exist.
        max_model_len: Longest prompt plus response, in tokens.
    Raises: InvalidRequestError: names the field, its value and the bound.
    """
    if not call.request_id:
        raise InvalidRequestError("request_id is empty; give every attempt its own")
    if not 1 <= call.num_samples <= MAX_SAMPLES_PER_REQUEST:
        raise InvalidRequestError(f"num_samples is {call.num_samples}; it must be within 1..{MAX_SAMPLES_PER_REQUEST}")
    _check_prompt(call.prompt_ids, vocab_size)
    _check_sampling(call.sampling, vocab_size)
    _check_seeds(call.seeds, call.num_samples)
    total = len(call.prompt_ids) + call.sampling.max_new_tokens
    if total > max_model_len:
        raise InvalidRequestError(
            f"prompt of {len(call.prompt_ids)} tokens plus max_new_tokens {call.sampling.max_new_tokens} is {total}, "
            f"above max_model_len {max_model_len}; shorten the prompt or lower max_new_tokens"
        )


def _check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_ids:
        raise InvalidRequestError("prompt_ids is empty; give at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        position, token = next((i, token) for i, token in enumerate(prompt_ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"prompt_ids[{position}] is {token}; ids must be within 0..{vocab_size - 1} for this model, was it tokenised for another one?"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    temperature = sampling.temperature
    # The comparisons also refuse NaN.
    if not (temperature == 0 or _MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        raise InvalidRequestError(f"temperature is {temperature}; it must be 0 (greedy) or within {_MIN_TEMPERATURE}..{MAX_TEMPERATURE}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise InvalidRequestError(f"top_k is {sampling.top_k}; it must be 0 (off) or more")
    if sampling.max_new_tokens < 1:
        raise InvalidRequestError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise InvalidRequestError(f"min_new_tokens is {sampling.min_new_tokens}; it must be within 0..{sampling.max_new_tokens}")
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise InvalidRequestError(f"stop_token_ids has {outside[0]}; ids must be within 0..{vocab_size - 1}")


def _check_seeds(seeds: Sequence[int], num_samples: int) -> None:
    if seeds and len(seeds) != num_samples:
        raise InvalidRequestError(f"{len(seeds)} seeds for {num_samples} samples; give one per sample or none")
    # The engine takes -1 for "no seed".
    negative = [seed for seed in seeds if not 0 <= seed < math.inf]
    if negative:
        raise InvalidRequestError(f"seeds has {negative[0]}; seeds must not be negative")
