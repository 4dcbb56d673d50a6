"""Settings that have an effect only beside others: written out where they have none, they are a wish that would be ignored.

A value equal to the field's default passes, so that a recorded configuration, which holds every field, loads again. Where the default
would say something wrong (a standard deviation that does not divide), another value passes, and `resolve_config` fills it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shoal.config.base import Section
from shoal.config.functions import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Choice, Entrypoint, Registered
from shoal.config.models import RunConfig
from shoal.config.signatures import keyword_settings

CHOICES: Mapping[str, Mapping[str, Registered]] = {
    "estimator": ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
    "value_loss": VALUE_LOSSES,
}
"""Fields of the algorithm section that choose a function."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A setting without effect: section.field, or a whole section; and the line that says why."""

    setting: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Settings with one condition.

    settings: section.field. when: whether they have an effect. because: why not, filled with the configuration. fix: what to do.
    neutral: value that passes although the condition is not met; None is the field's default.
    """

    settings: tuple[str, ...]
    when: Callable[[RunConfig], bool]
    because: str
    fix: str
    neutral: float | None = None

    def problems(self, config: RunConfig) -> Iterator[Idle]:
        """Each setting that is written out and has no effect."""
        if self.when(config):
            return
        for setting in self.settings:
            section, _, field = setting.partition(".")
            if is_written(getattr(config, section), field, self.neutral):
                value, because = _shown(getattr(getattr(config, section), field)), self.because.format(config)
                problem = f"{setting} is {value} but {because}, so it would have no effect; {self.fix}, or leave {field} out"
                yield Idle(setting, problem)


def is_written(section: Section, field: str, neutral: object = None) -> bool:
    """Whether a field was given a value of its own."""
    passes = type(section).model_fields[field].default if neutral is None else neutral
    return field in section.model_fields_set and getattr(section, field) != passes


_NO_CRITIC = "algorithm.estimator {0.algorithm.estimator} has no critic"

EFFECTS: tuple[Effect, ...] = (
    Effect(
        settings=("algorithm.kl_coef",),
        when=lambda config: config.algorithm.kl_in_reward,
        because="algorithm.kl_in is {0.algorithm.kl_in}",
        fix="set kl_in to reward or both (kl_loss_coef is the coefficient of the loss)",
        neutral=0.0,
    ),
    Effect(
        settings=("algorithm.kl_loss_coef",),
        when=lambda config: config.algorithm.kl_in_loss,
        because="algorithm.kl_in is {0.algorithm.kl_in}",
        fix="set kl_in to loss or both (kl_coef is the coefficient of the reward)",
        neutral=0.0,
    ),
    Effect(
        settings=("algorithm.kl_estimator",),
        when=lambda config: config.algorithm.kl_in_reward,
        because="algorithm.kl_in is {0.algorithm.kl_in}",
        fix="set kl_in to reward or both (kl_loss_estimator is that of the loss)",
    ),
    Effect(
        settings=("algorithm.kl_loss_estimator",),
        when=lambda config: config.algorithm.kl_in_loss,
        because="algorithm.kl_in is {0.algorithm.kl_in}",
        fix="set kl_in to loss or both (kl_estimator is that of the reward)",
    ),
    Effect(
        settings=("algorithm.kl_controller", "model.reference_path"),
        when=lambda config: config.algorithm.has_reference,
        because="algorithm.kl_in is none",
        fix="set kl_in to reward, loss or both",
    ),
    Effect(
        settings=("algorithm.kl_target", "algorithm.kl_horizon"),
        when=lambda config: config.algorithm.kl_controller == "adaptive",
        because="algorithm.kl_controller is {0.algorithm.kl_controller}",
        fix="set kl_controller to adaptive",
    ),
    Effect(
        settings=(
            "algorithm.bootstrap_truncated",
            "algorithm.value_loss",
            "algorithm.value_clip",
            "algorithm.critic_warmup_steps",
        ),
        when=lambda config: config.algorithm.has_critic,
        because=_NO_CRITIC,
        fix="set estimator to gae",
    ),
    Effect(
        settings=("algorithm.loss_norm_length",),
        when=lambda config: config.algorithm.loss_aggregation == "seq_mean_token_sum_norm",
        because="algorithm.loss_aggregation is {0.algorithm.loss_aggregation}",
        fix="set loss_aggregation to seq_mean_token_sum_norm",
    ),
    Effect(
        settings=("algorithm.importance_low",),
        when=lambda config: config.algorithm.importance_weights.endswith("mask"),
        because="algorithm.importance_weights is {0.algorithm.importance_weights}",
        fix="set importance_weights to token_mask or sequence_mask",
    ),
    Effect(
        settings=("algorithm.importance_high",),
        when=lambda config: config.algorithm.importance_weights != "none",
        because="algorithm.importance_weights is none",
        fix="choose importance_weights",
    ),
    Effect(
        settings=("algorithm.rejection_low", "algorithm.rejection_high"),
        when=lambda config: config.algorithm.rejection != "none",
        because="algorithm.rejection is none",
        fix="set rejection to sequence or geometric",
    ),
    Effect(
        settings=("rollout.max_refills",),
        when=lambda config: config.rollout.dynamic_sampling,
        because="rollout.dynamic_sampling is false",
        fix="set dynamic_sampling to true",
    ),
    Effect(
        settings=("reward.overlong_penalty",),
        when=lambda config: config.reward.overlong_buffer_tokens > 0,
        because="reward.overlong_buffer_tokens is 0",
        fix="set overlong_buffer_tokens",
    ),
    Effect(
        settings=("reward.version",),
        when=lambda config: not config.reward.sources or config.reward.scorer in config.reward.sources.values(),
        because="reward.sources names other scorers than reward.scorer {0.reward.scorer}, whose version it is",
        fix="set scorer to one of them",
    ),
    Effect(
        settings=("reward.scorer",),
        when=lambda config: not config.reward.sources or bool(config.reward.version),
        because="reward.sources chooses the scorer of each row",
        fix="name the scorer there",
    ),
    Effect(
        settings=("reward.clip", "reward.normalise", "reward.overlong_buffer_tokens"),
        when=lambda config: config.algorithm.estimator != "gdpo",
        because="algorithm.estimator gdpo normalises the raw components of reward.weights",
        fix="choose another estimator",
    ),
    Effect(
        settings=("evaluation.top_p", "evaluation.top_k"),
        when=lambda config: config.evaluation.temperature > 0,
        because="evaluation.temperature is 0, which is greedy",
        fix="set a temperature",
    ),
    Effect(
        settings=(
            "data.held_out_split",
            *(f"evaluation.{name}" for name in ("max_prompts", "samples", "temperature", "max_new_tokens", "correct_from")),
        ),
        when=lambda config: config.data.held_out is not None,
        because="data.held_out is not set",
        fix="give the path of held-out rows",
    ),
    Effect(
        settings=("actor.min_lr_share",),
        when=lambda config: config.actor.lr_schedule != "constant",
        because="actor.lr_schedule is constant",
        fix="set lr_schedule to linear or cosine",
    ),
    Effect(
        settings=("critic.min_lr_share",),
        when=lambda config: config.critic.lr_schedule != "constant" or not config.algorithm.has_critic,
        because="critic.lr_schedule is constant",
        fix="set lr_schedule to linear or cosine",
    ),
    Effect(
        settings=("actor.offload",),
        when=lambda config: config.actor.device != "cpu",
        because="actor.device is cpu, whose memory is the host's already",
        fix="set device to cuda",
    ),
    Effect(
        settings=("critic.offload",),
        when=lambda config: config.critic.device != "cpu" or not config.algorithm.has_critic,
        because="critic.device is cpu, whose memory is the host's already",
        fix="set device to cuda",
    ),
)


def settings_without_effect(config: RunConfig) -> Iterator[Idle]:
    """Yield each setting that is written out and has no effect."""
    for effect in EFFECTS:
        yield from effect.problems(config)
    for field, registry in CHOICES.items():
        if field != "value_loss" or config.algorithm.has_critic:
            yield from _unused_settings(config, field, registry)
    yield from _critic(config)


_NORMALISE_BATCH = ("reinforce_pp", "reinforce_pp_baseline", "gdpo")
"""Estimators that normalise over the batch whatever whiten_advantages is."""


def unused_values(config: RunConfig) -> dict[str, object]:
    """Fields of the algorithm section that say nothing or something wrong as they are -> what is so instead."""
    algorithm = config.algorithm
    values: dict[str, object] = {}
    if not algorithm.kl_in_reward:
        values["kl_coef"] = 0.0
    if not algorithm.kl_in_loss:
        values["kl_loss_coef"] = 0.0
    unused = _unused(algorithm.estimator, ESTIMATORS)
    if "group_std" in unused:
        values["group_std"] = "none"
    if "whiten_advantages" in unused:
        values["whiten_advantages"] = algorithm.estimator in _NORMALISE_BATCH
    return values


def _unused(choice: Choice, registry: Mapping[str, Registered]) -> dict[str, list[str]]:
    """Settings of other functions of a table -> those functions. Empty for a user's own function: it may use any field."""
    own = None if isinstance(choice, Entrypoint) or choice not in registry else keyword_settings(registry[choice].path)
    users: dict[str, list[str]] = {}
    for name, registered in registry.items():
        for setting in (keyword_settings(registered.path) or frozenset()) - (own or frozenset()):
            users.setdefault(setting, []).append(name)
    return {} if own is None else users


def _unused_settings(config: RunConfig, field: str, registry: Mapping[str, Registered]) -> Iterator[Idle]:
    algorithm = config.algorithm
    choice: Choice = getattr(algorithm, field)
    unused, instead = _unused(choice, registry), unused_values(config)
    for setting in type(algorithm).model_fields:
        if setting not in unused or not is_written(algorithm, setting, instead.get(setting)):
            continue
        neutral = instead.get(setting, type(algorithm).model_fields[setting].default)
        because = "always normalises over the batch" if setting == "whiten_advantages" and instead[setting] else "does not use it"
        problem = (
            f"algorithm.{setting} is {_shown(getattr(algorithm, setting))} but algorithm.{field} {choice} {because}, so it would have no "
            f"effect; leave it out, or at {_shown(neutral)}, or set {field} to one that uses it: {', '.join(unused[setting])}"
        )
        yield Idle(f"algorithm.{setting}", problem)


def _critic(config: RunConfig) -> Iterator[Idle]:
    written = [field for field in type(config.critic).model_fields if is_written(config.critic, field)]
    if written and not config.algorithm.has_critic:
        names = ", ".join(f"critic.{field}" for field in written)
        because = _NO_CRITIC.format(config)
        fix = "leave the section critic out (--set critic=null), or set estimator to gae"
        yield Idle("critic", f"{names}: {because}, so they would have no effect; {fix}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
