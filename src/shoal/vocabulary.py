"""Which ids can be sampled: those that the tokenizer knows, not the padding of the embedding behind them.

Coordinator, engine and trainer all ask here, so that the engine samples from, and the trainer normalises over, the same ids. Only files
are read: a tokenizer library may be missing in one service, and they would disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_BPE = "vocab.json"
_SENTENCEPIECE = "tokenizer.model"
_PIECE_TAG = 0x0A
"""Field 1 of SentencePiece's ModelProto, `repeated SentencePiece pieces`, with a length before each."""


def sampled_vocab_size(model_path: str, vocab_size: int) -> int:
    """Ids [0, n) that can be sampled: up to the tokenizer's largest id, within the model's vocabulary.

    The tokenizer's ids are those of tokenizer.json, or without one of vocab.json and tokenizer.model (SentencePiece), and the added ones
    beside them. Where a folder has neither, or the tokenizer is the model's own code, all ids count.

    Args:
        model_path: Hugging Face folder, or id of a model in the local cache.
        vocab_size: rows of the model's embedding, as its config.json has it.
    Raises: ConfigError: a file of the tokenizer cannot be read.
    """
    file = _file_of(model_path, _TOKENIZER)
    own = _largest_of_files(model_path) if file is None else _largest_of_tokenizer(file)
    if own is None:
        return vocab_size
    return min(vocab_size, max([own, *_added_ids(model_path)]) + 1)


def _largest_of_tokenizer(file: Path) -> int | None:
    """Largest id in tokenizer.json, added tokens included; None if it lists none."""
    tokenizer = _read(file)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        # Unigram models list (token, score) pairs in the order of their ids.
        own = _largest(vocabulary, file) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        added = [int(token["id"]) for token in tokenizer.get("added_tokens") or ()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(file, error) from error
    return _none_if_empty(max(own, *added, -1))


def _largest_of_files(model_path: str) -> int | None:
    """Largest id in the files of a tokenizer without tokenizer.json; None if they do not tell."""
    config = _file_of(model_path, _CONFIG)
    if config is not None and "auto_map" in _read(config):
        # The model's own code may put any number of special tokens behind what the files hold.
        return None
    found = []
    vocabulary, pieces = _file_of(model_path, _BPE), _file_of(model_path, _SENTENCEPIECE)
    if vocabulary is not None:
        found.append(_largest(_read(vocabulary), vocabulary))
    if pieces is not None:
        num_pieces = _count_pieces(pieces.read_bytes())
        # Other formats under this name leave special tokens to code.
        if num_pieces is None:
            return None
        found.append(num_pieces - 1)
    return _none_if_empty(max(found, default=-1))


def _added_ids(model_path: str) -> Iterator[int]:
    """Ids that `transformers` adds to what the tokenizer's own file has."""
    file = _file_of(model_path, _ADDED)
    if file is not None:
        yield _largest(_read(file), file)
    file = _file_of(model_path, _CONFIG)
    if file is not None:
        try:
            yield from (int(token_id) for token_id in _read(file).get("added_tokens_decoder") or {})
        except (TypeError, ValueError) as error:
            raise _unreadable(file, error) from error


def _largest(ids: dict[str, Any], file: Path) -> int:
    try:
        return max((int(token_id) for token_id in ids.values()), default=-1)
    except (TypeError, ValueError) as error:
        raise _unreadable(file, error) from error


def _none_if_empty(largest: int) -> int | None:
    return None if largest < 0 else largest


def _count_pieces(model: bytes) -> int | None:
    """Pieces of a SentencePiece model, which are numbered in their order; None if it is something else."""
    count, position = 0, 0
    while position < len(model) and model[position] == _PIECE_TAG:
        length, position = _varint(model, position + 1)
        position += length
        count += 1
    return count if count and position <= len(model) else None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in protobuf's encoding, and where it ends."""
    value, shift = 0, 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(content, dict):
        raise _unreadable(file, TypeError(f"a JSON object was expected, not {type(content).__name__}"))
    return content


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read as a tokenizer ({type(error).__name__}: {error}); restore the model's file")


def _file_of(model_path: str, name: str) -> Path | None:
    if Path(model_path).is_dir():
        file = Path(model_path) / name
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model_path, name)
    except ValueError as error:
        raise ConfigError(f"model.path {model_path!r} is neither a folder nor a Hugging Face id ({error}); correct it") from error
    return Path(cached) if isinstance(cached, str) else None
