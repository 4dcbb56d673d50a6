"""Texts and policy ids as the ids that a reward model reads.

Legend: N input tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import DataError
from shoal_reward.models.chat import check_length, messages_of
from shoal_reward.models.settings import ModelSection


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One sample. ids: [N]. type_ids: [N] or None: which text of a pair. num_response: response tokens at the end, for per_token."""

    ids: list[int]
    type_ids: list[int] | None = None
    num_response: int = 0


class InputReader:
    """Makes inputs of samples; several threads may ask."""

    def __init__(self, settings: ModelSection, tokenizer: Any, *, max_tokens: int, vocab_size: int) -> None:  # noqa: ANN401 - no usable types
        self._settings = settings
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        # Fast tokenizers fail ("Already borrowed") when two threads use one.
        self._turn = threading.Lock()
        self._first_ids = {token_id for token_id in (tokenizer.bos_token_id, tokenizer.cls_token_id) if token_id is not None}

    def read(self, prompt: str, response: str, row: Mapping[str, object]) -> ModelInput:
        """Make the input of one sample.

        Raises: DataError: it is too long, its row lacks what is needed, or an id is not in the vocabulary.
        """
        if self._settings.per_token:
            return self._of_policy_ids(_ids(row, "prompt_ids"), _ids(row, "response_ids"))
        check_length(prompt, response, self._settings.max_text_chars)
        with self._turn:
            if self._settings.input == "pair":
                return self._of_pair(prompt, response)
            return ModelInput(self._shortened(self._of_text(prompt, response, row)))

    def _of_text(self, prompt: str, response: str, row: Mapping[str, object]) -> list[int]:
        settings, tokenizer = self._settings, self._tokenizer
        if settings.input == "chat":
            messages = messages_of(prompt, response, row, settings.messages_key)
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        else:
            text = f"{prompt}{settings.separator}{response}"
        ids: list[int] = tokenizer(text, add_special_tokens=settings.input == "text", verbose=False)["input_ids"]
        bos = tokenizer.bos_token_id
        # A prompt that a template made has its own, and the tokenizer adds one.
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if settings.append_eos and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        return ids

    def _shortened(self, ids: list[int]) -> list[int]:
        if not ids:
            raise DataError("prompt and response are no token at all: nothing can be scored")
        num_dropped = len(ids) - self._max_tokens
        if num_dropped <= 0:
            return ids
        self._check_may_shorten(len(ids))
        num_kept = 1 if ids[0] in self._first_ids else 0
        return ids[:num_kept] + ids[num_kept + num_dropped :]

    def _of_pair(self, prompt: str, response: str) -> ModelInput:
        options: dict[str, Any] = {"verbose": False}
        if self._settings.overlong == "truncate_left":
            options |= {"truncation": "only_first", "max_length": self._max_tokens}
        encoded = self._tokenizer(prompt, response, **options)
        if len(encoded["input_ids"]) > self._max_tokens:
            self._check_may_shorten(len(encoded["input_ids"]))
            raise DataError(f"the response alone is longer than {self._max_tokens} tokens: raise max_tokens or shorten responses")
        return ModelInput(encoded["input_ids"], encoded.get("token_type_ids"))

    def _of_policy_ids(self, prompt_ids: list[int], response_ids: list[int]) -> ModelInput:
        for token_id in (*prompt_ids, *response_ids):
            if not 0 <= token_id < self._vocab_size:
                raise DataError(f"id {token_id} is not among the model's {self._vocab_size}: the policy has another tokenizer")
        if not response_ids:
            raise DataError("the response has no token: nothing can be scored")
        num_dropped = max(0, len(prompt_ids) + len(response_ids) - self._max_tokens)
        if num_dropped:
            self._check_may_shorten(len(prompt_ids) + len(response_ids))
        if len(response_ids) > self._max_tokens:
            raise DataError(f"the response alone has {len(response_ids)} tokens, max_tokens allows {self._max_tokens}")
        num_kept = 1 if num_dropped and prompt_ids[:1] and prompt_ids[0] in self._first_ids and num_dropped < len(prompt_ids) else 0
        return ModelInput(prompt_ids[:num_kept] + prompt_ids[num_kept + num_dropped :] + response_ids, num_response=len(response_ids))

    def _check_may_shorten(self, num_tokens: int) -> None:
        if self._settings.overlong == "refuse":
            limit = self._max_tokens
            raise DataError(
                f"the input has {num_tokens} tokens, the model takes {limit}: shorten responses, or set overlong: truncate_left"
            )


def _ids(row: Mapping[str, object], name: str) -> list[int]:
    ids = row.get(name)
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)) or not all(type(token_id) is int for token_id in ids):
        raise DataError(f"the row has no {name}: send token ids to scorers whose description asks for them")
    return list(ids)
