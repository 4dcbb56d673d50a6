"""Loads a reward model, and sees that what came out can be a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal_reward.models.files import label_place
from shoal_reward.models.forward import Forward, Head
from shoal_reward.models.inputs import InputReader, ModelInput
from shoal_reward.models.settings import ModelSection

log = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Of the comparison at start; a model that is pooled at another token differs by more."""
_LARGEST_TOKENIZER_LIMIT = 1 << 24
_PROBE_LENGTHS = (3, 7, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A reward model in memory. label: place of the output that is the score."""

    forward: Forward
    reader: InputReader
    label: int


def load_model(settings: ModelSection) -> LoadedModel:
    """Load model and tokenizer onto the device.

    Raises: ConfigError: they cannot be loaded, lack a head, or do not fit the settings or the policy.
    """
    # Its lines would stand among those of the log.
    transformers.utils.logging.disable_progress_bar()
    model = _load_weights(settings)
    tokenizer = _load_tokenizer(settings, settings.model)
    config = model.config.get_text_config()
    reader = InputReader(settings, tokenizer, max_tokens=_max_tokens(settings, config, tokenizer), vocab_size=config.vocab_size)
    _check_inputs(settings, tokenizer, config.vocab_size)
    device = _device(settings)
    forward = Forward(model=model.to(device), head=_head(settings, model), device=device, pad_id=_pad_id(config, tokenizer))
    checked = _checked(forward, settings, _special_ids(tokenizer, config), tokenizer.eos_token_id)
    return LoadedModel(forward=checked, reader=reader, label=label_place(model.config.to_dict(), settings.label))


def _load_weights(settings: ModelSection) -> Any:  # noqa: ANN401 - transformers ships no usable types
    options = {"revision": settings.revision, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(settings.model, **options)
        kind = transformers.AutoModelForTokenClassification if _is_token_model(config) else transformers.AutoModelForSequenceClassification
        model, found = kind.from_pretrained(
            settings.model, config=config, dtype=_DTYPES[settings.dtype], use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"model {settings.model} cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error
    # transformers makes up what a file lacks, the head of a model that never had one among it.
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ConfigError(f"model {settings.model} lacks {shown}: it is no trained reward model; name one with a classification head")
    return model.eval()


def _is_token_model(config: Any) -> bool:  # noqa: ANN401 - see above
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def _load_tokenizer(settings: ModelSection, path: str) -> Any:  # noqa: ANN401 - see above
    revision = settings.revision if path == settings.model else None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"the tokenizer of {path} cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error
    # For pairs, the only inputs that the tokenizer itself shortens.
    tokenizer.truncation_side = "left"
    return tokenizer


def _check_inputs(settings: ModelSection, tokenizer: Any, vocab_size: int) -> None:  # noqa: ANN401 - see above
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            f"the tokenizer of {settings.model} has {len(tokenizer)} tokens, the model {vocab_size}: they do not belong together"
        )
    if settings.per_token:
        _check_policy(settings, tokenizer)
    elif settings.input == "chat" and not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {settings.model} has no chat template: set input to text or pair")
    if settings.append_eos and tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {settings.model} names no end token: leave append_eos out")


def _check_policy(settings: ModelSection, tokenizer: Any) -> None:  # noqa: ANN401 - see above
    assert settings.policy_tokenizer is not None  # noqa: S101 - the settings see to it
    policy = _load_tokenizer(settings, settings.policy_tokenizer).get_vocab()
    own = tokenizer.get_vocab()
    if policy != own:
        differing = sorted(token for token in policy.keys() | own.keys() if policy.get(token) != own.get(token))
        raise ConfigError(
            f"the tokenizers of {settings.model} ({len(own)} tokens) and {settings.policy_tokenizer} ({len(policy)}) differ in "
            f"{len(differing)}, {differing[0]!r} for one: per_token needs a reward model that was trained on the policy's tokenizer"
        )


def _max_tokens(settings: ModelSection, config: Any, tokenizer: Any) -> int:  # noqa: ANN401 - see above
    # Tokenizers without a limit say 1e30. RoBERTa has two more positions than tokens; its tokenizer knows.
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "n_positions", None), tokenizer.model_max_length]
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _LARGEST_TOKENIZER_LIMIT]
    limit = min(known) if known else None
    if settings.max_tokens is None and limit is None:
        raise ConfigError(f"model {settings.model} does not say how many tokens it takes: set max_tokens")
    if settings.max_tokens is not None and limit is not None and settings.max_tokens > limit:
        raise ConfigError(f"max_tokens is {settings.max_tokens}, but model {settings.model} takes {limit}: lower it")
    return settings.max_tokens if settings.max_tokens is not None else int(limit or 0)


def _device(settings: ModelSection) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but PyTorch finds no GPU: set device: cpu, or give the service one")
    return torch.device("cuda" if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()) else "cpu")


def _head(settings: ModelSection, model: Any) -> Head:  # noqa: ANN401 - see above
    if _is_token_model(model.config):
        if not settings.per_token:
            raise ConfigError(f"model {settings.model} gives an output for every token: set per_token: true")
        return Head.TOKENS
    if isinstance(getattr(model, "score", None), torch.nn.Module) and model.base_model is not model:
        return Head.LAST
    if settings.per_token:
        raise ConfigError(f"model {settings.model} pools by itself and gives no output for a token: use a *ForTokenClassification model")
    return Head.WHOLE


def _pad_id(config: Any, tokenizer: Any) -> int:  # noqa: ANN401 - see above
    # RoBERTa counts positions by its own pad id.
    found = config.pad_token_id if config.pad_token_id is not None else tokenizer.pad_token_id
    return 0 if found is None or not 0 <= found < config.vocab_size else int(found)


def _special_ids(tokenizer: Any, config: Any) -> set[int]:  # noqa: ANN401 - see above
    return {*tokenizer.all_special_ids, *([] if config.pad_token_id is None else [config.pad_token_id])}


def _checked(forward: Forward, settings: ModelSection, special_ids: set[int], end_id: int | None) -> Forward:
    """The same, or one sample at a time for a model whose own forward for one sample gives something else than a padded batch."""
    if forward.head is Head.TOKENS:
        return forward
    vocab_size = forward.model.config.get_text_config().vocab_size
    usable = [token_id for token_id in range(min(vocab_size, 1000)) if token_id not in special_ids] or [0]
    # Encoder-decoders pool at the end token.
    ends = [] if end_id is None else [end_id]
    probes = [ModelInput([usable[(7 * place + length) % len(usable)] for place in range(length)] + ends) for length in _PROBE_LENGTHS]
    singly = Forward(model=forward.model, head=Head.SINGLE, device=forward.device, pad_id=forward.pad_id)
    if _agree(forward, singly, probes, _TOLERANCES[settings.dtype]):
        return forward
    if settings.per_token:
        raise ConfigError(f"model {settings.model} does more than its head over the hidden states: per_token cannot be read from it")
    log.warning("reward_model_scores_one_by_one", model=settings.model, reason="a padded batch and single samples differ")
    return singly


def _agree(together: Forward, singly: Forward, probes: Sequence[ModelInput], tolerance: float) -> bool:
    try:
        batch = together.pooled(probes)
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError):
        return False
    return torch.allclose(batch, singly.pooled(probes), rtol=tolerance, atol=tolerance, equal_nan=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
