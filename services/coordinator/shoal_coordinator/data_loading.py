"""From files to tokenised rows, at the start of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config.models import RunConfig
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal_coordinator.prompts import LengthRule, PromptRow, load_prompt_rows
from shoal_coordinator.tokenizing import HuggingFaceTokenizer, ModelLimits, load_tokenizer, read_model_limits, stop_ids

log = get_logger(__name__)

PROGRESS_LOG_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """Tokenised rows and what their model says."""

    tokenizer: HuggingFaceTokenizer
    train: list[PromptRow]
    held_out: list[PromptRow]
    stop_token_ids: tuple[int, ...]
    vocab_size: int


def load_data(config: RunConfig) -> LoadedData:
    """Read tokenizer and rows; slow, so call it in a thread.

    Raises: ConfigError: the model's folder is unusable. DataError: a file or row is.
    """
    limits = read_model_limits(config.model.path)
    _check_context(config, limits)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    rule = LengthRule(
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
        vocab_size=limits.vocab_size,
        max_context=limits.max_context,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    train = load_prompt_rows(
        config.data.train,
        config.data,
        tokenizer,
        rule,
        min_rows=config.rollout.prompts_per_step,
        progress=progress_log(config.data.train),
    )
    held_out: list[PromptRow] = []
    if config.data.held_out is not None:
        held_out = load_prompt_rows(config.data.held_out, config.data, tokenizer, rule, max_rows=config.evaluation.max_prompts)
    log.info("data_loaded", train_rows=len(train), held_out_rows=len(held_out))
    return LoadedData(
        tokenizer=tokenizer, train=train, held_out=held_out, stop_token_ids=stop_ids(tokenizer, limits), vocab_size=limits.vocab_size
    )


def _check_context(config: RunConfig, limits: ModelLimits) -> None:
    new_tokens = config.rollout.max_new_tokens
    if limits.max_context is not None and new_tokens >= limits.max_context:
        raise ConfigError(
            f"rollout.max_new_tokens is {new_tokens}, but the context of model {config.model.path} has {limits.max_context} tokens, prompt "
            f"included: lower it below {limits.max_context}"
        )


def progress_log(path: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A callback for (tokenised, all) rows that logs every PROGRESS_LOG_S seconds, so that a large file is seen to advance."""
    last_s = clock()

    def report(num_done: int, num_rows: int) -> None:
        nonlocal last_s
        if clock() - last_s >= PROGRESS_LOG_S:
            last_s = clock()
            log.info("data_loading", path=path, num_done=num_done, num_rows=num_rows)

    return report
