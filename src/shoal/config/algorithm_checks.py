"""Rules of the sections algorithm and reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.config.algorithm import AlgorithmSection
from shoal.config.effects import CHOICES
from shoal.config.functions import Entrypoint, Registered
from shoal.config.models import RunConfig


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield a line for each broken rule."""
    for field, registry in CHOICES.items():
        yield from _choice(config.algorithm, field, registry)
    yield from _groups(config)
    yield from _kl(config.algorithm)
    yield from _kl_horizon(config)
    yield from _off_policy(config.algorithm)
    yield from _components(config)
    yield from _shaping(config)
    yield from _nothing_to_train(config)
    yield from _critic_warmup(config)


def _choice(algorithm: AlgorithmSection, field: str, registry: Mapping[str, Registered]) -> Iterator[str]:
    choice = getattr(algorithm, field)
    if not isinstance(choice, Entrypoint):
        if choice not in registry:
            names = ", ".join(repr(name) for name in sorted(registry))
            own = "a function of your own as {entrypoint: package.module.function}"
            yield f"algorithm.{field} is {choice!r}; use one of {names}, or {own}{_elsewhere(choice, field)}"
        return
    if choice.needs and field != "estimator":
        yield f"algorithm.{field}.needs is {list(choice.needs)}, but only an estimator needs something; leave it out"
    for name in sorted(choice.settings.keys() & type(algorithm).model_fields.keys()):
        yield (
            f"algorithm.{field}.settings has {name!r}, which is a field of the section algorithm; set algorithm.{name}: the function "
            "gets it by that name"
        )


def _elsewhere(choice: str, field: str) -> str:
    """A hint for a name of another table."""
    others = [other for other, registry in CHOICES.items() if other != field and choice in registry]
    return f" ({choice} is {'an' if others[0] == 'estimator' else 'a'} {others[0]})" if others else ""


def _groups(config: RunConfig) -> Iterator[str]:
    if config.rollout.group_size > 1:
        return
    if "groups" in config.algorithm.needs:
        estimator = config.algorithm.estimator
        name = estimator.entrypoint if isinstance(estimator, Entrypoint) else estimator
        yield (
            f"algorithm.estimator {name} compares the samples of one prompt, but rollout.group_size is 1: "
            "every advantage would be 0; set group_size to at least 2 or the estimator to gae"
        )
    if config.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling drops groups whose rewards are all equal, but rollout.group_size is 1: every group would be "
            "dropped; set group_size to at least 2 or dynamic_sampling to false"
        )


def _kl(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.kl_in_loss and algorithm.kl_loss_estimator == "k1":
        yield (
            "algorithm.kl_loss_estimator is k1, whose gradient is 0 in expectation: it would add noise and no pull to the reference; "
            "use k2, k3_straight_through (both with the gradient of the KL) or k3"
        )
    coefs = {"kl_coef": algorithm.kl_in_reward, "kl_loss_coef": algorithm.kl_in_loss}
    zero = [name for name, is_on in coefs.items() if is_on and getattr(algorithm, name) == 0]
    if algorithm.kl_in == "both" and zero:
        other = {"kl_coef": "loss", "kl_loss_coef": "reward"}[zero[0]]
        yield f"algorithm.kl_in is both but algorithm.{zero[0]} is 0; give both terms a coefficient, or set kl_in to {other}"
    if algorithm.kl_controller != "adaptive":
        return
    if algorithm.kl_target is None:
        yield "algorithm.kl_controller is adaptive but algorithm.kl_target is not set; give the KL per response, in nats, to aim at"
    if zero and algorithm.kl_in != "both":
        yield (
            f"algorithm.kl_controller is adaptive but algorithm.{zero[0]} is 0, which no factor changes; start from a positive coefficient"
        )


def _kl_horizon(config: RunConfig) -> Iterator[str]:
    horizon, num_samples = config.algorithm.kl_horizon, config.rollout.prompts_per_step * config.rollout.group_size
    if config.algorithm.kl_controller == "adaptive" and 5 * horizon <= num_samples:
        yield (
            f"algorithm.kl_horizon is {horizon}, at most a fifth of the {num_samples} samples of a step: a single step could make the "
            "coefficient 0 or negative; raise it"
        )


def _off_policy(algorithm: AlgorithmSection) -> Iterator[str]:
    if algorithm.old_logprobs == "rollout":
        for field in ("importance_weights", "rejection"):
            if getattr(algorithm, field) != "none":
                yield (
                    f"algorithm.{field} is {getattr(algorithm, field)} but algorithm.old_logprobs is rollout: the ratio trainer / engine "
                    f"that it looks at would be 1 everywhere; set old_logprobs to trainer or {field} to none"
                )
    if algorithm.importance_weights.endswith("mask"):
        yield from _window("importance", algorithm.importance_low, algorithm.importance_high)
    if algorithm.rejection != "none":
        yield from _window("rejection", algorithm.rejection_low, algorithm.rejection_high)


def _window(name: str, low: float, high: float) -> Iterator[str]:
    if not low < high:
        yield f"algorithm.{name}_low is {low:g}, not below algorithm.{name}_high {high:g}: nothing would be kept; lower it"
    elif not low <= 1 <= high:
        yield (
            f"algorithm.{name}_low and {name}_high are {low:g} and {high:g}: a ratio of 1, where trainer and engine agree, would be "
            "dropped; choose bounds around 1"
        )


def _components(config: RunConfig) -> Iterator[str]:
    weights = config.reward.weights
    if weights and not any(weights.values()):
        yield f"reward.weights are all 0 ({', '.join(weights)}), so every reward would be 0; give at least one component a weight"
    if config.algorithm.estimator != "gdpo":
        return
    if not weights:
        yield "algorithm.estimator gdpo normalises each component of the reward by itself, but reward.weights is empty; name the components"
    if config.algorithm.kl_in_reward:
        yield (
            f"algorithm.estimator gdpo compares components of the reward, and algorithm.kl_in is {config.algorithm.kl_in}: a KL in the "
            "reward would have no effect; set kl_in to loss or none"
        )


def _shaping(config: RunConfig) -> Iterator[str]:
    reward, max_new_tokens = config.reward, config.rollout.max_new_tokens
    if reward.clip is not None and not reward.clip[0] < reward.clip[1]:
        yield f"reward.clip is {list(reward.clip)}; the lower bound must be below the upper one"
    if reward.overlong_buffer_tokens > max_new_tokens:
        yield (
            f"reward.overlong_buffer_tokens is {reward.overlong_buffer_tokens}, above rollout.max_new_tokens {max_new_tokens}: even an "
            "empty response would be penalised; lower it"
        )


def _nothing_to_train(config: RunConfig) -> Iterator[str]:
    if config.algorithm.mask_truncated and config.algorithm.bootstrap_truncated:
        yield (
            "algorithm.bootstrap_truncated continues responses that were cut, and algorithm.mask_truncated leaves these out of the loss; "
            "set one of them to false"
        )
    if config.algorithm.mask_truncated and config.rollout.ignore_eos:
        yield (
            "algorithm.mask_truncated leaves out responses that were cut, and rollout.ignore_eos lets all of them run until they are: "
            "nothing would be trained; set one of them to false"
        )


def _critic_warmup(config: RunConfig) -> Iterator[str]:
    num_steps = config.algorithm.critic_warmup_steps
    if config.algorithm.has_critic and 0 < config.run.steps <= num_steps:
        yield (
            f"algorithm.critic_warmup_steps is {num_steps} and run.steps {config.run.steps}: the actor would never be trained; "
            "lower the first or raise the second"
        )
