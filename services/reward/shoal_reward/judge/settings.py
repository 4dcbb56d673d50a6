"""What a judge is asked, and what it may answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shoal.config.base import Section
from shoal_reward.judge.rubric import Rubric
from shoal_reward.remote.settings import EndpointSection

_OWN_FIELDS = frozenset({"model", "messages", "stream", "n", "max_tokens", "max_completion_tokens", "temperature"})


class ScoreRange(Section):
    """A number that the judge gives."""

    low: float = 0.0
    """Least; a number below it is an error of the sample."""
    high: float = 10.0
    """Greatest; a number above it is an error of the sample."""
    weight: float = 1.0
    """Factor of this number in the reward."""

    @model_validator(mode="after")
    def _check_order(self) -> ScoreRange:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}: set a range")
        return self


class JudgeSection(EndpointSection):
    """A language model behind an OpenAI-compatible chat endpoint that grades by a rubric."""

    rubric: str
    """Text with {response}, {prompt} and {row.COLUMN}; {{name}} writes {name}. The form of the answer is told behind it."""
    answer: Literal["line", "json"] = "line"
    """line: the answer's last line is `Score: x`. json: the answer is one JSON object with the numbers of `fields`."""
    score: ScoreRange = ScoreRange()
    """Range and weight of the number of a line."""
    fields: dict[str, ScoreRange] = Field(default_factory=dict)
    """Names and ranges of the numbers of an object; each, times its weight, is a component of the reward."""
    temperature: float | None = Field(default=0.0, ge=0)
    """0: the likeliest answer; null: not sent."""
    max_tokens: int = Field(default=512, ge=1)
    """New tokens at most; an answer that this cuts is an error of the sample."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls that limit."""
    system_role: bool = True
    """Whether the model has a system role; otherwise all is said in the user's message."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, such as {seed: 1} or {chat_template_kwargs: {enable_thinking: false}}."""
    max_text_chars: int = Field(default=200_000, ge=1)
    """A longer request text is an error of the sample."""

    @model_validator(mode="after")
    def _check_answer(self) -> JudgeSection:
        if (self.answer == "json") != bool(self.fields):
            raise ValueError("fields goes with answer: json, and is needed there: name the numbers of the object")
        if taken := _OWN_FIELDS & set(self.extra):
            raise ValueError(f"extra sets {', '.join(sorted(taken))}, which settings of their own decide: leave them out")
        if bad := [name for name in self.fields if not name.isidentifier()]:
            raise ValueError(f"fields has the name {bad[0]!r}: use letters, digits and _")
        Rubric(self.rubric)
        return self
