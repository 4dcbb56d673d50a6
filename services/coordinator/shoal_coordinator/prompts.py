"""Where prompts come from: JSONL rows, tokenised once, issued in a seeded order that a position of two numbers continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.models import DataSection
from shoal.errors import DataError
from shoal.types import Int32Array
from shoal_coordinator.tokenizing import Prompt, PromptTokenizer

TOKENISE_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A usable row. prompt_ids: [P] int32. text is what scorers see; row is the whole JSON object."""

    row_index: int
    prompt_ids: Int32Array
    text: str
    row: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """A prompt issued for one group; uid and group_id depend on the position alone."""

    uid: str
    group_id: str
    prompt_ids: Int32Array
    text: str
    row: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPosition:
    """The next prompt to issue: place `index` of the order of `epoch`. Plain state for ledgers and checkpoints."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule:
    """Bounds of a prompt after the chat template. max_new_tokens must fit behind it into max_context (None: unknown)."""

    max_prompt_tokens: int
    overlong: str
    vocab_size: int
    max_context: int | None
    max_new_tokens: int

    @property
    def longest(self) -> int:
        """Most prompt tokens that pass."""
        if self.max_context is None:
            return self.max_prompt_tokens
        return min(self.max_prompt_tokens, self.max_context - self.max_new_tokens)


class PromptSource:
    """Issues prompts epoch after epoch. An epoch's rest that is smaller than a batch is completed from the next epoch."""

    def __init__(self, rows: Sequence[PromptRow], *, seed: int, shuffle: bool, position: PromptPosition | None = None) -> None:
        """Args:
        rows: at least one.
        seed: with the epoch's number it gives the epoch's order.
        shuffle: False keeps the file's order.
        position: where to go on; None starts at the beginning.
        """
        if not rows:
            raise DataError("there are no prompts to issue")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._position = PromptPosition() if position is None else position
        self._order = self._order_of(self._position.epoch)

    @property
    def position(self) -> PromptPosition:
        """The next prompt to issue."""
        return self._position

    def take(self, num_prompts: int) -> list[PromptTask]:
        """Issue the next prompts and advance the position."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> PromptTask:
        epoch, index = self._position.epoch, self._position.index
        row = self._rows[int(self._order[index])]
        if index + 1 < len(self._rows):
            self._position = PromptPosition(epoch=epoch, index=index + 1)
        else:
            self._position = PromptPosition(epoch=epoch + 1, index=0)
            self._order = self._order_of(epoch + 1)
        return as_task(row, f"e{epoch}-i{index}")

    def _order_of(self, epoch: int) -> Int32Array:
        order = np.arange(len(self._rows), dtype=np.int32)
        return np.random.default_rng([self._seed, epoch]).permutation(order) if self._shuffle else order


def as_task(row: PromptRow, uid: str) -> PromptTask:
    """Issue a row under an id."""
    return PromptTask(uid=uid, group_id=uid, prompt_ids=row.prompt_ids, text=row.text, row=row.row)


def load_prompt_rows(
    path: str,
    data: DataSection,
    tokenizer: PromptTokenizer,
    rule: LengthRule,
    *,
    min_rows: int = 1,
    max_rows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PromptRow]:
    """Read, tokenise and check the rows of a JSONL file.

    Args:
        path: file with one JSON object a line; blank lines are skipped.
        data: names the prompt column.
        rule: length and vocabulary bounds.
        min_rows: fewer usable rows than this (a batch) are refused.
        max_rows: read only so many rows.
        progress: told (tokenised, all) rows now and then.
    Raises: DataError: with file and line where they apply.
    """
    rows = read_rows(path, max_rows)
    usable: list[PromptRow] = []
    for start in range(0, len(rows), TOKENISE_CHUNK):
        chunk = rows[start : start + TOKENISE_CHUNK]
        usable += _tokenise(path, chunk, data.prompt_key, tokenizer, rule)
        progress(start + len(chunk), len(rows))
    if len(usable) < min_rows:
        raise DataError(
            f"{path}: {len(usable)} of {len(rows)} rows are usable (prompts of at most {rule.longest} tokens), but a batch needs "
            f"{min_rows}: add rows, raise data.max_prompt_tokens, or lower rollout.prompts_per_step"
        )
    return usable


def read_rows(path: str, max_rows: int | None = None) -> list[tuple[int, dict[str, object]]]:
    """Read (line number, object) pairs of a JSONL file.

    Raises: DataError: missing, unreadable or empty file, or a line that is no JSON object.
    """
    rows: list[tuple[int, dict[str, object]]] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, start=1):
                if max_rows is not None and len(rows) >= max_rows:
                    break
                if line.strip():
                    rows.append((line_number, _parse(path, line_number, line)))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file: correct data.train / data.held_out") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}): it should be UTF-8 text with one JSON object a line") from error
    if not rows:
        raise DataError(f"{path}: the file has no rows: it should have one JSON object a line")
    return rows


def _parse(path: str, line_number: int, line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{line_number}: not JSON ({error}): correct the line or remove it") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}:{line_number}: a JSON {type(value).__name__} where an object is needed")
    return value


def _tokenise(
    path: str, rows: Sequence[tuple[int, dict[str, object]]], prompt_key: str, tokenizer: PromptTokenizer, rule: LengthRule
) -> list[PromptRow]:
    texts = [_text_of(path, line_number, row, prompt_key, tokenizer) for line_number, row in rows]
    return [
        PromptRow(row_index=line_number - 1, prompt_ids=ids, text=text, row=row)
        for (line_number, row), text, ids in zip(rows, texts, tokenizer.encode(texts), strict=True)
        if _passes(f"{path}:{line_number}", ids, rule)
    ]


def _text_of(path: str, line_number: int, row: dict[str, object], prompt_key: str, tokenizer: PromptTokenizer) -> str:
    try:
        return tokenizer.text(_prompt_of(row, prompt_key))
    except DataError as error:
        raise DataError(f"{path}:{line_number}: {error}") from error


def _prompt_of(row: dict[str, object], prompt_key: str) -> Prompt:
    if prompt_key not in row:
        raise DataError(f"no column {prompt_key!r} (has {sorted(row)}): set data.prompt_key")
    value: Any = row[prompt_key]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return value
    raise DataError(f"{prompt_key!r} is a {type(value).__name__}: it should be a string or a list of chat messages")


def _passes(where: str, ids: Int32Array, rule: LengthRule) -> bool:
    if ids.size == 0:
        raise DataError(f"{where}: the prompt has no tokens")
    if int(ids.min()) < 0 or int(ids.max()) >= rule.vocab_size:
        raise DataError(
            f"{where}: token id {int(ids.max())} is outside the model's vocabulary of {rule.vocab_size}: tokenizer and model do not match"
        )
    if ids.size <= rule.longest:
        return True
    if rule.overlong == "filter":
        return False
    limit = f"data.max_prompt_tokens {rule.max_prompt_tokens}"
    if rule.longest < rule.max_prompt_tokens:
        limit = f"the model's context {rule.max_context} less rollout.max_new_tokens {rule.max_new_tokens}"
    raise DataError(
        f"{where}: the prompt has {ids.size} tokens, more than {limit}: shorten it, raise the limit, or set data.overlong=filter"
    )
