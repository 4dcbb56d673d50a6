"""From rows to prompts: answer, source and prompt columns, the chat template, ids, the length rule.

Ids are made here, once: the rollout servers get them in every request and the trainer inside the records, so both hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shoal.config.models import DataSection
from shoal.errors import DataError
from shoal.types import Int32Array
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.row_files import RowFiles, find_row_files
from shoal_coordinator.row_reading import Row, read_rows
from shoal_coordinator.tokenizing import Prompt, PromptTokenizer

TOKENISE_CHUNK = 1024
ANSWER = "answer"
"""Where scorers find the column data.answer_key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule:
    """Bounds of a prompt after the chat template, BOS included. max_new_tokens must fit behind it into max_context (None: unknown).

    A prompt that is cut keeps its BOS as the first token. Scorers see the text of the whole prompt nevertheless: the answer
    is judged by the question that was asked.
    """

    max_prompt_tokens: int
    overlong: str
    vocab_size: int
    max_context: int | None
    max_new_tokens: int
    new_tokens_setting: str = "rollout.max_new_tokens"

    @property
    def longest(self) -> int:
        """Most prompt tokens that pass."""
        if self.max_context is None:
            return self.max_prompt_tokens
        return min(self.max_prompt_tokens, self.max_context - self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where rows come from and which columns count. sources are the known values of source_key; none of them: it is not looked at."""

    path: str
    files: RowFiles
    prompt_key: str
    answer_key: str | None
    source_key: str
    sources: Collection[str]


def train_rows(data: DataSection, sources: Collection[str]) -> RowSource:
    """The training rows of a configuration. Raises: DataError: they cannot be found."""
    return _row_source(data, data.train, data.train_split, "data.train", sources)


def held_out_rows(data: DataSection, sources: Collection[str]) -> RowSource | None:
    """The held-out rows of a configuration, if it has any. Raises: DataError: they cannot be found."""
    return None if data.held_out is None else _row_source(data, data.held_out, data.held_out_split, "data.held_out", sources)


def _row_source(data: DataSection, path: str, split: str | None, setting: str, sources: Collection[str]) -> RowSource:
    return RowSource(
        path=path,
        files=find_row_files(path, split, setting),
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        source_key=data.source_key,
        sources=sources,
    )


def load_prompt_rows(
    source: RowSource,
    tokenizer: PromptTokenizer,
    rule: LengthRule,
    *,
    min_rows: int = 1,
    max_rows: int | None = None,
    progress: Callable[[int, int], None] = lambda num_read, num_usable: None,
) -> list[PromptRow]:
    """Read, tokenise and check rows.

    Args:
        source: files and columns.
        rule: length and vocabulary bounds.
        min_rows: fewer usable rows than this (a batch) are refused.
        max_rows: stop after so many usable rows; of what follows in a large file nothing is read.
        progress: told (read, usable) rows now and then.
    Raises: DataError: with file and row where they apply.
    """
    rows = read_rows(source.files)
    usable: list[PromptRow] = []
    num_read = 0
    while chunk := list(islice(rows, _chunk_size(len(usable), max_rows))):
        usable += _tokenise(chunk, source, tokenizer, rule)
        num_read += len(chunk)
        progress(num_read, len(usable))
    if num_read == 0:
        raise DataError(f"{source.path}: the file has no rows: it should have one JSON object a line, or be a table with rows")
    if len(usable) < min_rows:
        raise DataError(
            f"{source.path}: {len(usable)} of {num_read} rows are usable (prompts of at most {rule.longest} tokens), but a batch needs "
            f"{min_rows}: add rows, raise data.max_prompt_tokens, or lower rollout.prompts_per_step"
        )
    return usable


def _chunk_size(num_usable: int, max_rows: int | None) -> int:
    return TOKENISE_CHUNK if max_rows is None else min(TOKENISE_CHUNK, max_rows - num_usable)


def _tokenise(rows: Sequence[Row], source: RowSource, tokenizer: PromptTokenizer, rule: LengthRule) -> list[PromptRow]:
    prepared = [_prepare(row, source, tokenizer) for row in rows]
    encoded = tokenizer.encode([text for text, _ in prepared])
    return list(_usable(rows, prepared, encoded, rule, tokenizer.bos_token_id))


def _usable(
    rows: Sequence[Row],
    prepared: Sequence[tuple[str, dict[str, object]]],
    encoded: Sequence[Int32Array],
    rule: LengthRule,
    bos_token_id: int | None,
) -> Iterator[PromptRow]:
    for row, (text, columns), ids in zip(rows, prepared, encoded, strict=True):
        fitting = _fitted(row.place, ids, rule, bos_token_id)
        if fitting is not None:
            yield PromptRow(row_index=row.index, prompt_ids=fitting, text=text, row=columns)


def _prepare(row: Row, source: RowSource, tokenizer: PromptTokenizer) -> tuple[str, dict[str, object]]:
    """The prompt's text, and the row as scorers get it."""
    try:
        _check_source(row.columns, source)
        columns = _with_answer(row.columns, source.answer_key)
        return tokenizer.text(prompt_of(row.columns, source.prompt_key)), columns
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error


def _check_source(columns: Mapping[str, object], source: RowSource) -> None:
    if not source.sources:
        return
    known = ", ".join(sorted(source.sources))
    if source.source_key not in columns:
        raise DataError(
            f"no column {source.source_key!r} (has {sorted(columns)}), which chooses the scorer (known sources: {known}): "
            "set data.source_key"
        )
    value = columns[source.source_key]
    if not isinstance(value, str) or value not in source.sources:
        raise DataError(
            f"{source.source_key!r} is {value!r}, which reward.sources does not have (known sources: {known}): "
            "add it there with its scorer, or remove the row"
        )


def _with_answer(columns: dict[str, object], answer_key: str | None) -> dict[str, object]:
    if answer_key is None:
        return columns
    if answer_key not in columns:
        raise DataError(f"no column {answer_key!r} (has {sorted(columns)}): set data.answer_key")
    if columns[answer_key] is None:
        raise DataError(f"{answer_key!r} is null: give the answer, or remove the row")
    return {**columns, ANSWER: columns[answer_key]}


def prompt_of(columns: Mapping[str, object], prompt_key: str) -> Prompt:
    """The prompt of a row: text, or chat messages.

    A struct of equally long lists, which is how `datasets` stores a Sequence of messages, is turned into messages. Keys of a message
    that are null are left out: tables fill them in where another message has them.

    Raises: DataError: there is none, or it is neither.
    """
    if prompt_key not in columns:
        raise DataError(f"no column {prompt_key!r} (has {sorted(columns)}): set data.prompt_key")
    value: Any = columns[prompt_key]
    if isinstance(value, str):
        return value
    messages = _transposed(value) if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        what = "null" if value is None else "an empty list" if value == [] else f"of type {type(value).__name__}"
        raise DataError(f"{prompt_key!r} is {what}: it should be a string or a list of chat messages")
    return [_message(f"{prompt_key!r} message {number}", message) for number, message in enumerate(messages, start=1)]


def _transposed(columns: dict[str, Any]) -> list[dict[str, Any]] | None:
    lists = [value for value in columns.values() if value is not None]
    if "role" not in columns or not all(isinstance(value, list) for value in lists) or len({len(value) for value in lists}) != 1:
        return None
    names = [name for name, value in columns.items() if value is not None]
    return [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where} is of type {type(message).__name__}: it should be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    if not isinstance(given.get("role"), str):
        raise DataError(f"{where} has no role (has {sorted(given)}): give it a role such as user, and content")
    if not isinstance(given.get("content"), (str, list)) and "tool_calls" not in given:
        raise DataError(f"{where} has no content (has {sorted(given)}): it should be text")
    return given


def _fitted(place: str, ids: Int32Array, rule: LengthRule, bos_token_id: int | None) -> Int32Array | None:
    """The ids, cut if the rule says so; None leaves the row out."""
    if ids.size == 0:
        raise DataError(f"{place}: the prompt has no tokens")
    if int(ids.min()) < 0 or int(ids.max()) >= rule.vocab_size:
        raise DataError(
            f"{place}: token id {int(ids.max())} is outside the model's vocabulary of {rule.vocab_size}: tokenizer and model do not match"
        )
    if ids.size <= rule.longest:
        return ids
    if rule.overlong == "filter":
        return None
    if rule.overlong == "truncate_right":
        return ids[: rule.longest].copy()
    if rule.overlong == "truncate_left":
        return _cut_left(ids, rule.longest, bos_token_id)
    raise DataError(
        f"{place}: the prompt has {ids.size} tokens, more than {_limit(rule)}: shorten it, raise the limit, or set data.overlong to "
        "filter, truncate_left or truncate_right"
    )


def _cut_left(ids: Int32Array, longest: int, bos_token_id: int | None) -> Int32Array:
    """The last ids; where BOS was first it stays first and counts."""
    num_kept = 1 if ids[0] == bos_token_id else 0
    return np.concatenate([ids[:num_kept], ids[ids.size - (longest - num_kept) :]])


def _limit(rule: LengthRule) -> str:
    if rule.longest < rule.max_prompt_tokens:
        return f"the model's context {rule.max_context} less {rule.new_tokens_setting} {rule.max_new_tokens}"
    return f"data.max_prompt_tokens {rule.max_prompt_tokens}"
