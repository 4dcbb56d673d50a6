"""Prompt files, the length rule, the order of issue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from shoal_coordinator.data_loading import PROGRESS_LOG_S, progress_log
from shoal_coordinator.prompts import LengthRule, PromptPosition, PromptRow, PromptSource, load_prompt_rows

from shoal.config.models import DataSection, TelemetrySection
from shoal.errors import DataError
from shoal.telemetry.logs import setup_logging
from tests.helpers.coordinator_fakes import FakeTokenizer


def write(path: Path, *rows: object) -> str:
    file = path / "rows.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


def load(
    path: str,
    *,
    longest: int = 16,
    overlong: Literal["error", "filter"] = "error",
    max_context: int | None = None,
    vocab_size: int = 128,
    min_rows: int = 1,
    max_rows: int | None = None,
    prompt_key: str = "prompt",
) -> list[PromptRow]:
    data = DataSection(train=path, max_prompt_tokens=longest, overlong=overlong, prompt_key=prompt_key)
    rule = LengthRule(max_prompt_tokens=longest, overlong=overlong, vocab_size=vocab_size, max_context=max_context, max_new_tokens=4)
    return load_prompt_rows(path, data, FakeTokenizer(), rule, min_rows=min_rows, max_rows=max_rows)


def test_rows_keep_ids_text_and_all_columns(tmp_path: Path) -> None:
    (row,) = load(write(tmp_path, {"prompt": "1+1=", "answer": "2"}))
    assert (row.row_index, row.text, row.row) == (0, "1+1=", {"prompt": "1+1=", "answer": "2"})
    assert row.prompt_ids.tolist() == [49, 43, 49, 61]
    assert row.prompt_ids.dtype == np.int32


def test_chat_rows_blank_lines_and_another_column(tmp_path: Path) -> None:
    path = write(tmp_path, {"chat": [{"role": "user", "content": "hi"}]}, "", {"chat": "ho"})
    assert [(row.row_index, row.text) for row in load(path, prompt_key="chat")] == [(0, "hi"), (2, "ho")]


def test_length_rule_keeps_up_to_the_limit_and_refuses_above(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": "x" * length} for length in (15, 16, 17)))
    assert [row.prompt_ids.size for row in load(path, overlong="filter")] == [15, 16]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt has 17 tokens, more than data\.max_prompt_tokens 16"):
        load(path)


def test_prompt_and_response_must_fit_the_context(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x" * 9})
    assert len(load(path, max_context=13)) == 1
    with pytest.raises(DataError, match=r"context 12 less rollout\.max_new_tokens 4"):
        load(path, max_context=12)


def test_everything_filtered_or_less_than_a_batch_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": "x" * length} for length in (15, 16, 17)))
    with pytest.raises(DataError, match="0 of 3 rows are usable"):
        load(path, longest=4, overlong="filter")
    with pytest.raises(DataError, match=r"3 of 3 rows .* a batch needs 4"):
        load(path, longest=20, min_rows=4)
    assert len(load(path, longest=20, max_rows=2)) == 2


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ((), "has no rows"),
        (("", "  "), "has no rows"),
        (({"prompt": "a"}, "{bad"), r"rows\.jsonl:2: not JSON"),
        (({"prompt": "a"}, "[1]"), r"rows\.jsonl:2: a JSON list"),
        (({"prompt": "a"}, {"question": "b"}), r"rows\.jsonl:2: no column 'prompt' \(has \['question'\]\)"),
        (({"prompt": 3},), r"rows\.jsonl:1: 'prompt' is a int"),
        (({"prompt": []},), r"rows\.jsonl:1: 'prompt' is a list"),
        (({"prompt": ""},), r"rows\.jsonl:1: the prompt has no tokens"),
        (({"prompt": "é"},), r"rows\.jsonl:1: token id 233 is outside the model's vocabulary of 128"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, lines: tuple[object, ...], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load(write(tmp_path, *lines))


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        load(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        load(str(tmp_path))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load(str(binary))


def test_tokenising_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_coordinator.prompts.TOKENISE_CHUNK", 2)
    path = write(tmp_path, *({"prompt": "x"} for _ in range(5)))
    told: list[tuple[int, int]] = []
    rule = LengthRule(max_prompt_tokens=4, overlong="error", vocab_size=128, max_context=None, max_new_tokens=4)
    load_prompt_rows(path, DataSection(train=path), FakeTokenizer(), rule, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_progress_is_logged_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("coordinator", TelemetrySection(), stream=sys.stdout)
    times = iter([0.0, PROGRESS_LOG_S - 1, PROGRESS_LOG_S, PROGRESS_LOG_S, PROGRESS_LOG_S + 1])
    report = progress_log("train.jsonl", lambda: next(times))
    for num_done in (1, 2, 3):
        report(num_done, 3)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) | {"event": "data_loading", "path": "train.jsonl", "num_done": 2, "num_rows": 3} == json.loads(line)


def rows(num: int) -> list[PromptRow]:
    return [PromptRow(row_index=index, prompt_ids=np.array([index], np.int32), text=str(index), row={}) for index in range(num)]


def texts(source: PromptSource, num: int) -> list[str]:
    return [task.text for task in source.take(num)]


def test_source_without_shuffle_keeps_the_order_and_wraps_into_the_next_epoch() -> None:
    source = PromptSource(rows(3), seed=0, shuffle=False)
    tasks = source.take(4)
    assert [task.text for task in tasks] == ["0", "1", "2", "0"]
    assert [task.uid for task in tasks] == ["e0-i0", "e0-i1", "e0-i2", "e1-i0"]
    assert source.position == PromptPosition(epoch=1, index=1)


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    source = PromptSource(rows(20), seed=3, shuffle=True)
    first, second = texts(source, 20), texts(source, 20)
    assert sorted(first) == sorted(second) == sorted(str(index) for index in range(20))
    assert first != second
    assert first == texts(PromptSource(rows(20), seed=3, shuffle=True), 20)
    assert first != texts(PromptSource(rows(20), seed=4, shuffle=True), 20)


def test_source_goes_on_from_a_position() -> None:
    source = PromptSource(rows(7), seed=3, shuffle=True)
    source.take(9)
    resumed = PromptSource(rows(7), seed=3, shuffle=True, position=source.position)
    assert resumed.take(10) == source.take(10)


def test_source_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSource([], seed=0, shuffle=True)
