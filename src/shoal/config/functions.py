"""The estimators and losses by name: one line each. Plain data, so that a service without torch can check a name.

A user's own function needs no line here: `entrypoint: package.module.function` in place of a name, see `Entrypoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from shoal.config.base import Section

Need: TypeAlias = Literal["critic", "groups", "greedy"]
"""critic: values of a critic. groups: several samples per prompt. greedy: the reward of one greedy answer per prompt."""

Setting: TypeAlias = bool | int | float | str | None


class Entrypoint(Section):
    """A function of your own module."""

    entrypoint: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$")
    """package.module.function, importable by the trainer."""
    settings: dict[str, Setting] = Field(default_factory=dict)
    """Keyword arguments of the function that are no fields of `algorithm`."""
    needs: tuple[Need, ...] = ()
    """What an estimator needs: critic, groups (several samples per prompt), greedy (the reward of one greedy answer per prompt)."""


NAME_TAG, FUNCTION_TAG = "<name>", "<function>"
"""Which of the two a choice is; without them an error would be reported for both."""


def _tag(value: object) -> str:
    return FUNCTION_TAG if isinstance(value, Entrypoint | Mapping) else NAME_TAG


Choice: TypeAlias = Annotated[Annotated[str, Tag(NAME_TAG)] | Annotated[Entrypoint, Tag(FUNCTION_TAG)], Discriminator(_tag)]
"""A name of a table below, or a function of your own."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A function of this package: where it is, and what it needs."""

    path: str
    needs: frozenset[Need] = frozenset()


_GROUPS: frozenset[Need] = frozenset({"groups"})

ESTIMATORS: Mapping[str, Registered] = {
    "gae": Registered("shoal.algo.advantages.gae_estimator", frozenset({"critic"})),
    "grpo": Registered("shoal.algo.group_advantages.grpo_estimator", _GROUPS),
    "dr_grpo": Registered("shoal.algo.group_advantages.dr_grpo_estimator", _GROUPS),
    "gdpo": Registered("shoal.algo.group_advantages.gdpo_estimator", _GROUPS),
    "rloo": Registered("shoal.algo.group_advantages.rloo_estimator", _GROUPS),
    "reinforce_pp": Registered("shoal.algo.advantages.reinforce_pp_estimator"),
    "reinforce_pp_baseline": Registered("shoal.algo.group_advantages.reinforce_pp_baseline_estimator", _GROUPS),
    "remax": Registered("shoal.algo.advantages.remax_estimator", frozenset({"greedy"})),
}
"""(AdvantageInputs, SumOverRanks, *, settings) -> advantages, returns."""

POLICY_LOSSES: Mapping[str, Registered] = {
    "ppo": Registered("shoal.algo.losses.ppo_loss"),
    "gspo": Registered("shoal.algo.losses.gspo_loss"),
    "cispo": Registered("shoal.algo.losses.cispo_loss"),
    "reinforce": Registered("shoal.algo.losses.reinforce_loss"),
}
"""(logprobs, old_logprobs, advantages, response_mask, *, settings) -> TokenLoss."""

VALUE_LOSSES: Mapping[str, Registered] = {
    "clipped": Registered("shoal.algo.losses.value_loss"),
}
"""(values, old_values, returns, response_mask, *, settings) -> TokenLoss."""


def needs_of(estimator: Choice) -> frozenset[Need]:
    """What an estimator needs; nothing for an unknown name, which the checks refuse."""
    if isinstance(estimator, Entrypoint):
        return frozenset(estimator.needs)
    return ESTIMATORS[estimator].needs if estimator in ESTIMATORS else frozenset()
