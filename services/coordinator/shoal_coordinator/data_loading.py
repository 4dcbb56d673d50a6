"""From files to tokenised rows, at the start of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.config.models import RunConfig
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal.vocabulary import sampled_vocab_size
from shoal_coordinator.prompt_rows import LengthRule, held_out_rows, load_prompt_rows, train_rows
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.stop_tokens import stop_token_ids
from shoal_coordinator.tokenizing import HuggingFaceTokenizer, ModelLimits, PromptTokenizer, load_tokenizer, read_model_limits

log = get_logger(__name__)

PROGRESS_LOG_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """Tokenised rows and what their model says.

    stop_token_ids: all that end a response. vocab_size: ids [0, n) can be sampled; prompts hold no others either.
    """

    tokenizer: HuggingFaceTokenizer
    train: list[PromptRow]
    held_out: list[PromptRow]
    stop_token_ids: tuple[int, ...]
    vocab_size: int


def load_data(config: RunConfig) -> LoadedData:
    """Read tokenizer and rows; slow, so call it in a thread.

    Raises: ConfigError: the model's folder is unusable, or a stop token is. DataError: a file or row is.
    """
    limits = read_model_limits(config.model.path)
    _check_context(config, limits)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    vocab_size = sampled_vocab_size(config.model.path, limits.vocab_size)
    stops = stop_token_ids(tokenizer, limits, config.rollout, vocab_size)
    rule = _length_rule(config, limits, vocab_size)
    train = _load_train(config, tokenizer, rule)
    held_out = _load_held_out(config, tokenizer, rule)
    log.info("data_loaded", train_rows=len(train), held_out_rows=len(held_out))
    return LoadedData(tokenizer=tokenizer, train=train, held_out=held_out, stop_token_ids=stops, vocab_size=vocab_size)


def _load_train(config: RunConfig, tokenizer: PromptTokenizer, rule: LengthRule) -> list[PromptRow]:
    source = train_rows(config.data, config.reward.sources)
    min_rows = config.rollout.prompts_per_step
    return load_prompt_rows(source, tokenizer, rule, min_rows=min_rows, progress=progress_log(source.path))


def _load_held_out(config: RunConfig, tokenizer: PromptTokenizer, rule: LengthRule) -> list[PromptRow]:
    source = held_out_rows(config.data, config.reward.sources)
    if source is None:
        return []
    setting, max_new_tokens = _evaluation_tokens(config)
    rule = replace(rule, max_new_tokens=max_new_tokens, new_tokens_setting=setting)
    return load_prompt_rows(source, tokenizer, rule, max_rows=config.evaluation.max_prompts, progress=progress_log(source.path))


def _length_rule(config: RunConfig, limits: ModelLimits, vocab_size: int) -> LengthRule:
    return LengthRule(
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
        vocab_size=vocab_size,
        max_context=limits.max_context,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def _evaluation_tokens(config: RunConfig) -> tuple[str, int]:
    if config.evaluation.max_new_tokens is None:
        return "rollout.max_new_tokens", config.rollout.max_new_tokens
    return "evaluation.max_new_tokens", config.evaluation.max_new_tokens


def _check_context(config: RunConfig, limits: ModelLimits) -> None:
    for setting, new_tokens in (("rollout.max_new_tokens", config.rollout.max_new_tokens), _evaluation_tokens(config)):
        if limits.max_context is not None and new_tokens >= limits.max_context:
            raise ConfigError(
                f"{setting} is {new_tokens}, but the context of model {config.model.path} has {limits.max_context} tokens, prompt "
                f"included: lower it below {limits.max_context}"
            )


def progress_log(path: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A callback for (read, usable) rows that logs every PROGRESS_LOG_S seconds, so that a large file is seen to advance."""
    last_s = clock()

    def report(num_read: int, num_usable: int) -> None:
        nonlocal last_s
        if clock() - last_s >= PROGRESS_LOG_S:
            last_s = clock()
            log.info("data_loading", path=path, num_read=num_read, num_usable=num_usable)

    return report
