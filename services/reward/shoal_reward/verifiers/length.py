"""The length of a response: a penalty for long ones, or for the distance from a target."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.base import Section
from shoal.errors import DataError
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind


class LengthSettings(Section):
    """Linear ramps; lengths are in `unit`."""

    unit: Literal["characters", "tokens"] = "characters"
    """What is counted: characters of the text, or the policy's own tokens."""
    limit: int | None = Field(default=4096, gt=0)
    """Length at which the penalty is full; None is off."""
    buffer: int = Field(default=1024, gt=0)
    """Length before the limit over which the penalty grows from 0."""
    target: int | None = Field(default=None, ge=0)
    """Length that is best; None is off."""
    tolerance: int = Field(default=0, ge=0)
    """Distance from the target that costs nothing."""
    ramp: int = Field(default=1024, gt=0)
    """Distance beyond the tolerance at which the penalty is full."""
    penalty: float = Field(default=1.0, gt=0)
    """The full penalty of each."""

    @model_validator(mode="after")
    def _fits(self) -> LengthSettings:
        if self.limit is None and self.target is None:
            raise ValueError("has neither a limit nor a target: give one")
        if self.limit is not None and self.buffer > self.limit:
            raise ValueError(f"buffer {self.buffer} is above limit {self.limit}: even an empty response would be penalised")
        return self


def build(settings: LengthSettings) -> BuiltScorer:
    """Make a scorer of the length."""

    def score(prompt: str, response: str, row: Row) -> dict[str, float]:
        return {"length": length_reward(_length(response, row, settings.unit), settings)}

    return BuiltScorer(function=score, needs_token_ids=settings.unit == "tokens")


def length_reward(length: int, settings: LengthSettings) -> float:
    """Reward a length.

    Args:
        length: in the settings' unit.
        settings: limit and target; where both are given their penalties add up.
    Returns: 0 or below; the limit's part is -penalty * clamp((length - (limit - buffer)) / buffer, 0, 1).
    Source: the limit Yu et al. 2025 (DAPO), eq. 13, as `shoal.algo.rewards.overlong_penalty`.
    """
    excess = 0.0
    if settings.limit is not None:
        excess += _share(length - (settings.limit - settings.buffer), settings.buffer)
    if settings.target is not None:
        excess += _share(abs(length - settings.target) - settings.tolerance, settings.ramp)
    return 0.0 - settings.penalty * excess


def _share(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _length(response: str, row: Row, unit: str) -> int:
    if unit == "characters":
        return len(response)
    ids = row.get("response_ids")
    if not isinstance(ids, list | tuple):
        raise DataError("the row has no response_ids, so tokens cannot be counted: score through a run, or set unit: characters")
    return len(ids)


KIND = ScorerKind(
    description="0, less a penalty for a long response or one far from a target length.", settings=LengthSettings, build=build
)
