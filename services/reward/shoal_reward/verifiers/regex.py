"""The answer matches a regular expression.

Python's expressions can take exponential time. Nothing here guards against it: graders are processes with a time limit, so such a sample
is an error and costs its worker. Write patterns without nested repetitions.
"""

from __future__ import annotations

import functools
import re
from typing import Literal

from pydantic import Field, field_validator

from shoal.config.base import Section
from shoal.errors import DataError
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import ANSWER_RULES, Rule, find_answer
from shoal_reward.verifiers.gold import column_text, shared_code


class RegexSettings(Section):
    """What is matched against what."""

    pattern: str | None = None
    """A Python regular expression; None takes the row's."""
    column: str = Field(default="pattern", min_length=1)
    """Column with the row's pattern, where the settings have none."""
    match: Literal["search", "full"] = "search"
    """Whether the pattern may match anywhere, or must match all."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""
    extract: tuple[Rule, ...] = Field(default=ANSWER_RULES, min_length=1)
    """Where the answer stands in a response."""
    whole_response: bool = False
    """Match the untouched response instead of the answer in it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            return pattern if pattern is None else re.compile(pattern).pattern
        except re.error as error:
            raise ValueError(f"this is no regular expression: {error}") from None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise DataError(f"the row's pattern {pattern[:200]!r} is no regular expression: {error}") from None


def build(settings: RegexSettings) -> BuiltScorer:
    """Make a scorer that matches a pattern."""
    flags = re.IGNORECASE if settings.ignore_case else 0

    def score(prompt: str, response: str, row: Row) -> dict[str, float] | None:
        pattern = column_text(row, settings.column) if settings.pattern is None else settings.pattern
        if not pattern:
            return None
        answer = response if settings.whole_response else find_answer(response, settings.extract)
        compiled = _compiled(pattern, flags)
        found = compiled.fullmatch(answer) if settings.match == "full" else compiled.search(answer)
        return {"correct": float(found is not None)}

    return BuiltScorer(function=score, content=shared_code())


KIND = ScorerKind(description="1 if the answer matches a regular expression, else 0.", settings=RegexSettings, build=build)
