"""Rules between fields. Each refusal says what does not fit, the values, and what to change.

Those of the algorithm are in `shoal.config.algorithm_checks`, those of settings without an effect in `shoal.config.effects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.config.algorithm_checks import algorithm_problems
from shoal.config.effects import settings_without_effect, unused_values
from shoal.config.gang import GangSection
from shoal.config.models import MAX_PUSH_S, MIN_TEMPERATURE, RunConfig
from shoal.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Check everything that one field alone cannot tell.

    Raises: ConfigError: one line per broken rule.
    """
    problems = [line for rule in _RULES for line in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def resolve_config(config: RunConfig) -> RunConfig:
    """Return the configuration with derived values filled in: what has no effect does not look as if it had one.

    The coefficient of a KL term that is off becomes 0, group_std none where the estimator divides by no group's deviation, and
    whiten_advantages what the estimator does.
    """
    values = {name: value for name, value in unused_values(config).items() if getattr(config.algorithm, name) != value}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=values)}) if values else config


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.top_p < 1:
        yield (
            f"rollout.top_p is {rollout.top_p:g}: nucleus sampling renormalises the log-probabilities, so the ratio of the policies "
            "would be wrong; set it to 1"
        )
    if rollout.top_k > 0:
        yield (
            f"rollout.top_k is {rollout.top_k}: top-k renormalises the log-probabilities, so the ratio of the policies would be wrong; "
            "set it to 0"
        )
    if rollout.min_new_tokens > 0:
        yield (
            f"rollout.min_new_tokens is {rollout.min_new_tokens}: while a response is too short the log-probabilities are renormalised "
            "over the ids that do not end it, so the ratio of the policies would be wrong; set it to 0"
        )


def _sizes(config: RunConfig) -> Iterator[str]:
    num_samples = config.rollout.prompts_per_step * config.rollout.group_size
    product = f"rollout.prompts_per_step x group_size = {config.rollout.prompts_per_step} x {config.rollout.group_size} = {num_samples}"
    mini_batches = config.algorithm.mini_batches
    if num_samples % mini_batches:
        yield f"algorithm.mini_batches is {mini_batches}, which does not divide {product}; choose a divisor so that all are equally large"
    for name, gang in _gangs(config):
        if num_samples < gang.ranks * mini_batches:
            yield (
                f"{name}.ranks x algorithm.mini_batches = {gang.ranks} x {mini_batches} = {gang.ranks * mini_batches} exceeds {product}: "
                "a rank would have no sample; use fewer ranks or mini-batches, or more samples"
            )
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        if gang.micro_batch_tokens < longest:
            yield (
                f"{name}.micro_batch_tokens is {gang.micro_batch_tokens}, below the longest sequence of {longest} tokens "
                "(data.max_prompt_tokens + rollout.max_new_tokens); raise it or lower those"
            )
    if config.rollout.prompts_per_step > config.coordinator.max_pending_groups:
        yield (
            f"coordinator.max_pending_groups is {config.coordinator.max_pending_groups}, below rollout.prompts_per_step "
            f"{config.rollout.prompts_per_step}: a step's batch would never be complete; raise it to at least that"
        )


def _gang_settings(config: RunConfig) -> Iterator[str]:
    for name, gang in _gangs(config):
        if not all(0 <= beta < 1 for beta in gang.betas):
            yield f"{name}.betas is {list(gang.betas)}; AdamW needs both in [0, 1)"
    if config.critic.lora is not None and config.algorithm.has_critic:
        yield "critic.lora is set, but only the actor trains adapters: the critic's head starts from nothing; leave it out"


def _evaluation(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every > 0 and config.data.held_out is None:
        yield (
            f"evaluation.every is {evaluation.every} but data.held_out is not set, so there is nothing to evaluate; "
            "give the path of held-out rows or set every to 0"
        )
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samples is {evaluation.samples} but evaluation.temperature is 0, which is greedy: all answers to a row would be "
            "the same; set a temperature or samples to 1"
        )
    if 0 < evaluation.temperature < MIN_TEMPERATURE:
        yield (
            f"evaluation.temperature is {evaluation.temperature:g}; the engine takes 0 (greedy) or at least {MIN_TEMPERATURE:g}; set it to "
            "0 or raise it"
        )


def _servers(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_servers > rollout.servers:
        yield (
            f"rollout.min_servers is {rollout.min_servers}, above rollout.servers {rollout.servers}: a step would never start; "
            "lower the first or raise the second"
        )


def _push(config: RunConfig) -> Iterator[str]:
    push = config.push
    num_commits = config.rollout.servers if push.commit == "rolling" else 1
    longest_s = push.prepare_timeout_s + push.transfer_timeout_s + push.verify_timeout_s + num_commits * push.commit_timeout_s
    if longest_s > MAX_PUSH_S:
        yield (
            f"the deadlines of a push (push.*_timeout_s, commit {num_commits} x) are {longest_s:g} s together; a server keeps a push for "
            f"{MAX_PUSH_S:g} s at most, so lower them"
        )
    if push.transport == "collective" and not config.may_push_in_plaintext:
        yield (
            "push.transport is collective, which nothing encrypts, but security.insecure is false; set push.transport to grpc or auto, or "
            "push.plaintext_collective: true if only this run can reach the network between trainer and engines"
        )
    if push.transport == "cuda_ipc" and config.actor.device == "cpu":
        yield (
            "push.transport is cuda_ipc but actor.device is cpu, so no push could be made; set push.transport to auto, or actor.device to "
            "cuda"
        )


def _security(config: RunConfig) -> Iterator[str]:
    security = config.security
    names = ("ca_file", "cert_file", "key_file")
    given = [name for name in names if getattr(security, name) is not None]
    if not security.insecure and len(given) < len(names):
        missing = ", ".join(f"security.{name}" for name in names if name not in given)
        yield f"security.insecure is false but {missing} not set; mTLS needs all three files, or set insecure: true for plaintext"
    if security.insecure and given:
        yield (
            f"security.{given[0]} is set but security.insecure is true, so services would talk in plaintext; set insecure: false, "
            "or leave the files out"
        )


def _gangs(config: RunConfig) -> Iterator[tuple[str, GangSection]]:
    yield "actor", config.actor
    if config.algorithm.has_critic:
        # Group estimators start no critic.
        yield "critic", config.critic


def _idle(config: RunConfig) -> Iterator[str]:
    return (idle.problem for idle in settings_without_effect(config))


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _sampling,
    _sizes,
    algorithm_problems,
    _idle,
    _gang_settings,
    _servers,
    _evaluation,
    _push,
    _security,
)
