"""Rows to score: what a line may hold, and what is said of one that it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.reward import rows
from shoal.cli.reward.rows import BadLine, DataRow, check_data_file, read_rows
from shoal.errors import DataError
from shoal.types import FinishReason


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_all_columns_but_the_response_are_the_row(tmp_path: Path) -> None:
    row = {"prompt": "2+2", "response": "4", "answer": "4", "level": [1, None]}
    (found,) = read_rows(written(tmp_path, json.dumps(row)))
    assert isinstance(found, DataRow)
    sample = found.sample
    assert (found.line, sample.prompt, sample.response) == (1, "2+2", "4")
    assert sample.row == {"prompt": "2+2", "answer": "4", "level": [1, None]}
    assert (sample.finish_reason, sample.num_response_tokens, sample.response_ids) == (FinishReason.STOP, 0, ())


def test_token_ids_finish_reason_and_messages_are_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
    row = {"prompt": messages, "response": "4", "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "finish_reason": "length"}
    (found,) = read_rows(written(tmp_path, json.dumps(row)))
    assert isinstance(found, DataRow)
    sample = found.sample
    assert (sample.prompt, sample.prompt_ids, sample.response_ids) == ("Be brief.\n2+2", (1, 2), (3, 4, 5))
    assert (sample.finish_reason, sample.num_response_tokens) == (FinishReason.LENGTH, 3)


def test_lines_are_counted_and_bad_ones_do_not_stop_the_others(tmp_path: Path) -> None:
    found = list(read_rows(written(tmp_path, b"\xef\xbb\xbf" + b'{"response": "a"}', "", "nonsense", '{"response": "b"}')))
    assert [(type(row), row.line) for row in found] == [(DataRow, 1), (BadLine, 3), (DataRow, 4)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a JSON list where an object is needed"),
        ('{"answer": "4"}', "column 'response' is missing; there is: 'answer'"),
        ("{}", "column 'response' is missing; there is: none"),
        ('{"response": 4}', "column 'response' is no text"),
        ('{"response": "a", "prompt": 3}', "column 'prompt' is neither text nor a list of messages"),
        ('{"response": "a", "response_ids": [1, -2]}', "column 'response_ids' is no list of token ids"),
        ('{"response": "a", "num_response_tokens": 1.5}', "column 'num_response_tokens' is 1.5"),
        ('{"response": "a", "finish_reason": "bored"}', "column 'finish_reason' is 'bored'; write stop, length, abort"),
        ('{"response": "a", "x": NaN}', "holds NaN, which is not JSON"),
        ('{"response": "\\ud800"}', "half of a character"),
        ('{"response": "a", "x": "\\ud800"}', "half of a character"),
        (b'{"response": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_says_what_is_wrong(tmp_path: Path, line: str | bytes, words: str) -> None:
    (found,) = read_rows(written(tmp_path, line))
    assert isinstance(found, BadLine)
    assert words in found.problem


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 32)
    long = json.dumps({"response": "x" * 100})
    found = list(read_rows(written(tmp_path, long, '{"response": "b"}')))
    assert [(type(row), row.line) for row in found] == [(BadLine, 1), (DataRow, 2)]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(DataError, match="does not exist or is no file"):
            check_data_file(path)
