"""The response has the asked form, whatever it says."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from shoal.config.base import Section
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import last_boxed
from shoal_reward.verifiers.gold import shared_code


class FormatSettings(Section):
    """The form: tags, a pattern, a box; each that is asked for must be there."""

    tags: tuple[str, ...] = ("think", "answer")
    """Tags that must each stand exactly once, closed, one after the other; empty asks for none."""
    allow_text_outside: bool = False
    """Whether text may stand before, between and after the tags."""
    pattern: str | None = None
    """A Python regular expression that must match the whole response (a dot matches line ends too); None asks for none."""
    boxed: bool = False
    """Whether a \\boxed{} with something in it must be there."""
    reward: float = Field(default=1.0)
    """What the asked form gives."""
    penalty: float = Field(default=0.0, ge=0)
    """What another form costs."""

    @field_validator("tags")
    @classmethod
    def _are_names(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [tag for tag in tags if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", tag)]:
            raise ValueError(f"{bad[0]!r} is no name of a tag: write think, not <think>")
        if len(set(tags)) != len(tags):
            raise ValueError("a tag is named twice")
        return tags

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            return pattern if pattern is None else re.compile(pattern, re.DOTALL).pattern
        except re.error as error:
            raise ValueError(f"this is no regular expression: {error}") from None

    @model_validator(mode="after")
    def _asks_for_something(self) -> FormatSettings:
        if not self.tags and self.pattern is None and not self.boxed:
            raise ValueError("asks for no form: give tags, a pattern or boxed: true")
        return self


def build(settings: FormatSettings) -> BuiltScorer:
    """Make a scorer of the form."""
    pattern = None if settings.pattern is None else re.compile(settings.pattern, re.DOTALL)

    def score(prompt: str, response: str, row: Row) -> dict[str, float]:
        is_right = (
            _has_tags(response, settings.tags, settings.allow_text_outside)
            and (pattern is None or pattern.fullmatch(response) is not None)
            and (not settings.boxed or bool(last_boxed(response)))
        )
        return {"format": settings.reward if is_right else -settings.penalty}

    return BuiltScorer(function=score, content=shared_code())


def _has_tags(response: str, tags: tuple[str, ...], allow_text_outside: bool) -> bool:
    place = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if response.count(opening) != 1 or response.count(closing) != 1:
            return False
        start, end = response.find(opening), response.find(closing)
        if start < place or end < start or (not allow_text_outside and response[place:start].strip()):
            return False
        place = end + len(closing)
    return allow_text_outside or not tags or not response[place:].strip()


KIND = ScorerKind(description="1 if the response has the asked tags, pattern or box, else 0.", settings=FormatSettings, build=build)
