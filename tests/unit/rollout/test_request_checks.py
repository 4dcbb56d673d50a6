"""Requests that would harm the engine are refused with the field, the value and the bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from shoal_rollout.request_checks import GenerateCall, check_call

from shoal.errors import InvalidRequestError
from shoal.types import SamplingParams

GOOD = GenerateCall(request_id="r", prompt_ids=[0, 100], sampling=SamplingParams(max_new_tokens=30), num_samples=2, seeds=(0, 1))


def test_check_call_accepts_a_request_that_fits_exactly() -> None:
    check_call(GOOD, vocab_size=101, max_model_len=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, 101]}, r"prompt_ids\[1\] is 101; ids must be within 0..100"),
        ({"prompt_ids": [-1]}, r"prompt_ids\[0\] is -1"),
        ({"prompt_ids": [1, 2, 3]}, "is 33, above max_model_len 32"),
        ({"num_samples": 0, "seeds": ()}, "num_samples is 0"),
        ({"num_samples": 5000, "seeds": ()}, "num_samples is 5000"),
        ({"seeds": (1,)}, "1 seeds for 2 samples"),
        ({"seeds": (1, -1)}, "seeds has -1"),
    ],
)
def test_check_call_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_call(replace(GOOD, **changes), vocab_size=101, max_model_len=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": 2.5}, "temperature is 2.5"),
        ({"temperature": 1e-4}, "temperature is 0.0001"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"min_new_tokens": 31}, "min_new_tokens is 31"),
        ({"stop_token_ids": (101,)}, "stop_token_ids has 101"),
    ],
)
def test_check_call_refuses_sampling(changes: dict[str, Any], message: str) -> None:
    call = replace(GOOD, sampling=replace(GOOD.sampling, **changes))
    with pytest.raises(InvalidRequestError, match=message):
        check_call(call, vocab_size=101, max_model_len=32)
