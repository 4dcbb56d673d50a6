"""Rows of a JSONL file as samples to score; a line that is none is told, and does not stop the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shoal.errors import DataError
from shoal.types import FinishReason, ScoreSample

MAX_LINE_BYTES = 32 << 20
"""A longer line would not fit into a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A line of the file, counted from 1, as a sample."""

    line: int
    sample: ScoreSample


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be scored, and why."""

    line: int
    problem: str


def check_data_file(path: Path) -> None:
    """Raises: DataError: there is no such file, or it is none."""
    if not path.is_file():
        raise DataError(f"--data {path} does not exist or is no file; give a JSONL file whose rows have response, answer and prompt")


def read_rows(path: Path) -> Iterator[DataRow | BadLine]:
    """Read one line after the other; empty lines are skipped.

    Columns: response (text), prompt (text, or chat messages), prompt_ids, response_ids, num_response_tokens, finish_reason; but for
    response none must be there, and all but response are the row that the scorer sees.

    Raises: DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                if len(line) > MAX_LINE_BYTES:
                    yield BadLine(line=number, problem=f"more than {MAX_LINE_BYTES >> 20} MiB, which no scorer takes; shorten it")
                elif line.strip():
                    yield _read(number, line)
    except OSError as error:
        raise DataError(f"--data {path} cannot be read ({error.strerror}); check the path and its permissions") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines; of one that is too long, no more than it takes to see that."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)


def _read(number: int, line: bytes) -> DataRow | BadLine:
    try:
        # A byte order mark, as some editors write, is no part of the first object.
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
        return DataRow(line=number, sample=_sample(number, row))
    except UnicodeDecodeError as error:
        return BadLine(line=number, problem=f"not UTF-8 ({error.reason} at byte {error.start}); write the file as UTF-8")
    except DataError as error:
        return BadLine(line=number, problem=str(error))
    except (ValueError, RecursionError) as error:
        return BadLine(line=number, problem=f"not JSON ({error}); a row is one JSON object on one line")


def _refuse_constant(name: str) -> None:
    raise DataError(f"holds {name}, which is not JSON; write null or leave the column out")


def _sample(number: int, row: object) -> ScoreSample:
    if not isinstance(row, dict):
        raise DataError(f"a JSON {type(row).__name__} where an object is needed; write one object a line")
    response = row.get("response")
    if not isinstance(response, str):
        there_is = ", ".join(map(repr, row)) or "none"
        raise DataError(f"column 'response' is {'missing' if response is None else 'no text'}; there is: {there_is}")
    prompt_ids, response_ids = _ids(row, "prompt_ids"), _ids(row, "response_ids")
    columns = {key: value for key, value in row.items() if key != "response"}
    _check_text([response, json.dumps(columns, ensure_ascii=False)])
    return ScoreSample(
        sample_id=f"{number}/0/0",
        prompt=_prompt(row.get("prompt", "")),
        response=response,
        row=columns,
        finish_reason=_finish_reason(row.get("finish_reason", "stop")),
        num_response_tokens=_num_tokens(row.get("num_response_tokens", len(response_ids))),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
    )


def _check_text(texts: list[str]) -> None:
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{error.object[error.start]!r} is half of a character, which no call can carry"
        raise DataError(f"{what}; write whole characters") from None


def _prompt(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in prompt):
        return "\n".join(turn["content"] for turn in prompt)
    raise DataError("column 'prompt' is neither text nor a list of messages with content; write one of these, or leave it out")


def _ids(row: dict[str, object], column: str) -> tuple[int, ...]:
    ids = row.get(column, [])
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise DataError(f"column {column!r} is no list of token ids; write whole numbers from 0, or leave it out")
    return tuple(ids)


def _num_tokens(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise DataError(f"column 'num_response_tokens' is {number!r}; write a whole number from 0, or leave it out")
    return number


def _finish_reason(reason: object) -> FinishReason:
    try:
        return FinishReason(str(reason))
    except ValueError:
        raise DataError(f"column 'finish_reason' is {reason!r}; write {', '.join(FinishReason)}, or leave it out") from None
