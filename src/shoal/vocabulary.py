"""Which ids can be sampled: those that the tokenizer knows, not the padding of the embedding behind them.

Coordinator, engine and trainer all ask here, so that the engine samples from, and the trainer normalises over, the same ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

_TOKENIZER_FILE = "tokenizer.json"


def sampled_vocab_size(model_path: str, vocab_size: int) -> int:
    """Ids [0, n) that can be sampled: up to the tokenizer's largest id, within the model's vocabulary.

    Args:
        model_path: Hugging Face folder, or id of a model in the local cache. Without a tokenizer.json all ids count.
        vocab_size: rows of the model's embedding, as its config.json has it.
    Raises: ConfigError: tokenizer.json cannot be read.
    """
    file = _tokenizer_file(model_path)
    if file is None:
        return vocab_size
    try:
        tokenizer = json.loads(file.read_bytes())
        largest = max(_ids_of(tokenizer), default=vocab_size - 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer ({type(error).__name__}: {error}); restore the model's file") from error
    return min(vocab_size, largest + 1)


def _tokenizer_file(model_path: str) -> Path | None:
    if Path(model_path).is_dir():
        file = Path(model_path) / _TOKENIZER_FILE
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_path, _TOKENIZER_FILE)
    return Path(cached) if isinstance(cached, str) else None


def _ids_of(tokenizer: dict[str, Any]) -> list[int]:
    vocabulary = tokenizer["model"]["vocab"]
    # Unigram models list (token, score) pairs in the order of their ids.
    own = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    return own + [int(token["id"]) for token in tokenizer.get("added_tokens") or ()]
