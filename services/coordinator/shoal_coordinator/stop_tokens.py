"""Which ids end a response: the model's own, the tokenizer's, and those of the configuration. For training and evaluation alike."""

from __future__ import annotations

from shoal.config.models import RolloutSection
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal_coordinator.tokenizing import HuggingFaceTokenizer, ModelLimits

log = get_logger(__name__)


def stop_token_ids(tokenizer: HuggingFaceTokenizer, limits: ModelLimits, rollout: RolloutSection, vocab_size: int) -> tuple[int, ...]:
    """Merge all ids that end a response, sorted.

    Args:
        vocab_size: ids from it on are never sampled. The model's own end ids beyond it are left out.
    Raises: ConfigError: a configured id is never sampled, or a configured text is not one token; says what it becomes.
    """
    own = {*limits.eos_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
    never = sorted(token for token in own if not 0 <= token < vocab_size)
    if never:
        log.warning("end_ids_never_sampled", token_ids=never, vocab_size=vocab_size)
    for token in rollout.stop_token_ids:
        _check_sampled(f"rollout.stop_token_ids has {token}", token, vocab_size)
    by_text = {_id_of(tokenizer, text, vocab_size) for text in rollout.stop_tokens}
    return tuple(sorted({*own, *rollout.stop_token_ids, *by_text} - {*never}))


def _id_of(tokenizer: HuggingFaceTokenizer, text: str, vocab_size: int) -> int:
    ids = tokenizer.ids_of_token(text)
    if len(ids) != 1:
        becomes = f"the {len(ids)} tokens {ids}" if ids else "unknown to it"
        raise ConfigError(
            f"rollout.stop_tokens has {text!r}, which is not one token of the model's tokenizer, but {becomes}: "
            "name a token of its vocabulary"
        )
    _check_sampled(f"rollout.stop_tokens has {text!r}, which is id {ids[0]}", ids[0], vocab_size)
    return ids[0]


def _check_sampled(what: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ConfigError(f"{what}; only ids within 0..{vocab_size - 1} are ever sampled from this model: correct it")
