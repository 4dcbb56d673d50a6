"""Rules between fields, in one place. Each refusal says what does not fit, the values, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.gang import GangSection
from shoal.config.models import MAX_PUSH_S, RunConfig
from shoal.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Check everything that one field alone cannot tell.

    Raises: ConfigError: one line per broken rule.
    """
    problems = [*_sampling(config), *_sizes(config), *_algorithm(config), *_servers(config), *_push(config), *_security(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def resolve_config(config: RunConfig) -> RunConfig:
    """Return the configuration with derived values filled in: without a KL term its coefficient is 0."""
    if config.algorithm.kl_in == "none" and config.algorithm.kl_coef != 0:
        return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})})
    return config


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
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens is {rollout.min_new_tokens}, above rollout.max_new_tokens {rollout.max_new_tokens}; "
            "lower the first or raise the second"
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


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if "groups" in algorithm.needs and config.rollout.group_size == 1:
        yield (
            f"algorithm.estimator {algorithm.estimator} compares the samples of one prompt, but rollout.group_size is 1: "
            "every advantage would be 0; set group_size to at least 2 or the estimator to gae"
        )
    if algorithm.kl_in == "none" and "kl_coef" in algorithm.model_fields_set and algorithm.kl_coef != 0:
        yield (
            f"algorithm.kl_coef is {algorithm.kl_coef:g} but algorithm.kl_in is none, so it would have no effect; "
            "set kl_in to reward or loss, or leave kl_coef out"
        )
    for name, gang in _gangs(config):
        if not all(0 <= beta < 1 for beta in gang.betas):
            yield f"{name}.betas is {list(gang.betas)}; AdamW needs both in [0, 1)"


def _servers(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_servers > rollout.servers:
        yield (
            f"rollout.min_servers is {rollout.min_servers}, above rollout.servers {rollout.servers}: a step would never start; "
            "lower the first or raise the second"
        )
    if config.evaluation.every > 0 and config.data.held_out is None:
        yield (
            f"evaluation.every is {config.evaluation.every} but data.held_out is not set, so there is nothing to evaluate; "
            "give the path of held-out rows or set every to 0"
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
