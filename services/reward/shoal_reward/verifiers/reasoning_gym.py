"""A reasoning-gym task scores the answer."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pydantic import Field

from shoal.config.base import Section
from shoal.errors import DataError
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import Rule, find_answer
from shoal_reward.verifiers.gold import column_text, shared_code


class ReasoningGymSettings(Section):
    """Where the task and its entry stand."""

    dataset: str | None = Field(default=None, min_length=1)
    """The task, such as chain_sum; None takes the row's column `dataset`."""
    entry_column: str = Field(default="entry", min_length=1)
    """Column with the entry: question, answer, metadata."""
    extract: tuple[Rule, ...] = Field(default=(Rule.TAG, Rule.BOX, Rule.WHOLE), min_length=1)
    """Where the answer stands in a response."""


def build(settings: ReasoningGymSettings) -> BuiltScorer:
    """Make a scorer of reasoning-gym's tasks."""

    def score(prompt: str, response: str, row: Row) -> float:
        entry = row.get(settings.entry_column)
        if not isinstance(entry, dict):
            column = settings.entry_column
            raise DataError(f"the row has no object {column!r} (question, answer, metadata) of reasoning-gym: add the column")
        dataset = column_text(row, "dataset") if settings.dataset is None else settings.dataset
        return _score_answer(dataset)(find_answer(response, settings.extract), entry)

    return BuiltScorer(function=score, prepare=prepare, content=shared_code(libraries=("reasoning-gym",)))


def prepare() -> None:
    """Import reasoning-gym, which takes seconds."""
    importlib.import_module("reasoning_gym")


@functools.lru_cache(maxsize=256)
def _score_answer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    score: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return score


KIND = ScorerKind(
    description="The row's reasoning-gym dataset scores the answer against the row's entry; 0 to 1.",
    settings=ReasoningGymSettings,
    build=build,
)
