"""Text to prompt ids, once, at the start; response ids to text for the scorers. The only place of a run that tokenises.

Prompt ids go from here to the engines and, inside the records, to the trainer ranks, so all hold the same ids.
PyTorch is not imported where the model's folder has a tokenizer.json (all current models): the coordinator runs without it.

Legend: P prompt tokens, T response tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.errors import ConfigError, DataError
from shoal.types import Int32Array

Prompt = str | list[dict[str, Any]]
"""A plain string, or chat messages with `role` and `content`."""


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class PromptTokenizer(Protocol):
    """What the coordinator needs of a tokenizer."""

    @property
    def tokenizer_hash(self) -> str:
        """Changes with the vocabulary, the rules and the chat template."""

    @property
    def bos_token_id(self) -> int | None:
        """Id that starts a prompt, if the tokenizer has one."""

    def text(self, prompt: Prompt) -> str:
        """The prompt as the scorers see it: the string itself, or the rendered chat."""

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """[P] int32 ids of each text, with exactly one BOS if the tokenizer uses one."""

    def decode(self, responses: Sequence[Int32Array]) -> list[str]:
        """The text of [T] ids each, without special tokens; valid Unicode, whatever the ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model's config.json and generation_config.json say. max_context is None where they are silent."""

    vocab_size: int
    max_context: int | None
    eos_token_ids: tuple[int, ...]


class HuggingFaceTokenizer:
    """A `transformers` tokenizer under the rules above.

    BOS: where the tokenizer itself adds BOS to plain text, every prompt starts with exactly one, whether the chat template
    emits it or not. Where it does not, the template alone decides, and a run of several leading BOS becomes one.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers ships no usable types
        self._tokenizer = tokenizer
        self._bos_id: int | None = tokenizer.bos_token_id
        self._adds_bos = self._bos_id is not None and _adds_bos(tokenizer)
        self._hash = _hash_of(tokenizer)

    @property
    def tokenizer_hash(self) -> str:
        """sha256 (first 16 hex digits) of the tokenizer's rules and chat template."""
        return self._hash

    @property
    def bos_token_id(self) -> int | None:
        """Id that starts a prompt, if the tokenizer names one."""
        return self._bos_id

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a response, if the tokenizer names one."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def ids_of_token(self, text: str) -> list[int]:
        """The one id of a token by its text; several, or none, where the text is no single token.

        An entry of the vocabulary is taken as it is written there; other text, such as a line break, is tokenised.
        """
        entry: int | None = self._tokenizer.get_vocab().get(text)
        if entry is not None:
            return [entry]
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        # An unknown text is one id in some vocabularies: that of everything unknown.
        return [] if ids == [self._tokenizer.unk_token_id] else ids

    def text(self, prompt: Prompt) -> str:
        """Render a prompt; chat messages get the generation prompt appended, unless the last one is the assistant's: it is continued.

        Raises: DataError: chat messages without a chat template, or the template refuses them.
        """
        if isinstance(prompt, str):
            return valid_text(prompt)
        if not self._tokenizer.chat_template:
            raise DataError("the prompt is a list of chat messages, but the tokenizer has no chat template: give plain strings")
        # A template is the model's own code and raises what it likes.
        try:
            rendered: str = self._tokenizer.apply_chat_template(prompt, tokenize=False, **_ending(prompt))
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise DataError(f"the chat template refused the prompt: {type(error).__name__}: {error}") from error
        return valid_text(rendered)

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Tokenise texts that `text` returned.

        Returns: [P] int32 ids of each.
        """
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [self._with_one_bos(np.asarray(ids, dtype=np.int32)) for ids in encoded]

    def decode(self, responses: Sequence[Int32Array]) -> list[str]:
        """Decode responses, without special tokens; what is no text becomes U+FFFD."""
        if not responses:
            return []
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return list(map(valid_text, texts))

    def _with_one_bos(self, ids: Int32Array) -> Int32Array:
        if self._bos_id is None:
            return ids
        num_leading = int(np.argmin(np.append(ids == self._bos_id, False)))
        if num_leading == 0 and self._adds_bos:
            return np.concatenate([np.array([self._bos_id], np.int32), ids])
        return ids[max(0, num_leading - 1) :]


def valid_text(text: str) -> str:
    """The same text with U+FFFD for lone surrogates, which no UTF-8 can carry and no protobuf takes.

    A tokenizer written in Python may make them of ids whose bytes are no UTF-8, and JSON of a data row may hold them.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
    """Load the tokenizer of a Hugging Face folder or id.

    Raises: ConfigError: there is no readable tokenizer.
    """
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path {path!r} has no readable tokenizer: it should hold one of {', '.join(_TOKENIZER_FILES)}")
    from transformers import PreTrainedTokenizerFast

    # transformers raises many kinds for a bad folder.
    try:
        if not trust_remote_code and _has_tokenizer_json(path):
            return HuggingFaceTokenizer(PreTrainedTokenizerFast.from_pretrained(path))
        # Slow or custom tokenizers; imports PyTorch where it is installed.
        from transformers import AutoTokenizer

        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code))
    except Exception as error:  # the tokenizer libraries raise their own bare exceptions for unreadable files
        raise ConfigError(f"model.path {path!r} has no readable tokenizer ({type(error).__name__}: {error})") from error


def read_model_limits(path: str) -> ModelLimits:
    """Read vocabulary size, context length and end ids of a model without loading it.

    Args:
        path: Hugging Face folder or id.
    Raises: ConfigError: config.json is missing or has no vocab_size.
    """
    config = _read_json(path, "config.json")
    if config is None:
        if Path(path).is_dir():
            raise ConfigError(f"model.path {path!r} has no readable config.json: give a folder that holds a Hugging Face model")
        raise ConfigError(f"model.path {path!r} is no folder and not in the Hugging Face cache: correct it, or download the model")
    config = config.get("text_config", config)
    if "vocab_size" not in config:
        raise ConfigError(f"config.json of model.path {path!r} has no vocab_size")
    generation = _read_json(path, "generation_config.json") or {}
    return ModelLimits(
        vocab_size=int(config["vocab_size"]),
        max_context=_int_or_none(config.get("max_position_embeddings")),
        eos_token_ids=_as_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
    )


def _ending(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    begun = messages[-1].get("role") == "assistant"
    return {"continue_final_message": True} if begun else {"add_generation_prompt": True}


def _adds_bos(tokenizer: Any) -> bool:  # noqa: ANN401 - see above
    if getattr(tokenizer, "add_bos_token", False):
        return True
    return bool(tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [tokenizer.bos_token_id])


def _hash_of(tokenizer: Any) -> str:  # noqa: ANN401 - see above
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest = hashlib.sha256(rules.encode())
    digest.update(json.dumps(tokenizer.chat_template).encode())
    return digest.hexdigest()[:16]


def _has_tokenizer_json(path: str) -> bool:
    return _file_of(path, "tokenizer.json") is not None


def _read_json(path: str, name: str) -> dict[str, Any] | None:
    file = _file_of(path, name)
    if file is None:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} of model.path {path!r} is unreadable: {error}") from error
    return dict(content) if isinstance(content, Mapping) else None


def _file_of(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ConfigError(f"model.path {path!r} is neither a folder nor a reachable Hugging Face id ({error})") from error
    return None if found is None else Path(found)


def _as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(item) for item in value)


def _int_or_none(value: int | None) -> int | None:
    return None if value is None else int(value)
