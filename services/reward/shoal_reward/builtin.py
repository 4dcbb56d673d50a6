"""Scorers that ship with the reward service."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from shoal.errors import DataError
from shoal.reward import Row, reward

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(name="arithmetic", version="1")
def arithmetic(prompt: str, response: str, row: Row) -> float:
    """1 if the response is the row's `answer` (surrounding blanks aside), else 0."""
    return 1.0 if response.strip() == _text(row, "answer").strip() else 0.0


@reward(name="exact", version="1")
def exact(prompt: str, response: str, row: Row) -> float:
    """1 if the response equals the row's `answer` character by character, else 0."""
    return 1.0 if response == _text(row, "answer") else 0.0


@reward(name="reasoning_gym", version="1")
def reasoning_gym(prompt: str, response: str, row: Row) -> float:
    """The row's reasoning-gym `dataset` scores the answer against the row's `entry`; 0 to 1.

    The answer is what stands in the first <answer></answer>, else the whole response without surrounding blanks.
    """
    entry = row.get("entry")
    if not isinstance(entry, dict):
        raise DataError("the row has no object 'entry' (question, answer, metadata) of reasoning-gym: add the column")
    return _score_answer(_text(row, "dataset"))(extract_answer(response), entry)


def extract_answer(response: str) -> str:
    """Return what stands in the first <answer></answer>, else the whole response; without surrounding blanks."""
    tagged = _ANSWER_TAG.search(response)
    return (response if tagged is None else tagged.group(1)).strip()


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"the row's column {column!r} is {type(value).__name__}, not text: give each row a string {column!r}")
    return value


@functools.lru_cache(maxsize=256)
def _score_answer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    # Importing reasoning-gym takes seconds, so only rows that need it pay.
    from reasoning_gym import get_score_answer_fn

    score: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return score
