"""Rows of JSONL, Parquet and Arrow files, and the values in them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import ipc
from shoal_coordinator.row_files import find_row_files
from shoal_coordinator.row_reading import BATCH_ROWS, read_rows
from shoal_coordinator.row_values import plain_value

from shoal.errors import DataError

MESSAGES = [{"role": "user", "content": "1+1="}]


def columns_of(path: Path) -> list[dict[str, object]]:
    return [row.columns for row in read_rows(find_row_files(str(path), None, "data.train"))]


def write_parquet(path: Path, **columns: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_jsonl_rows_keep_line_and_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('\ufeff{"a": 1}\n\n  \n{"a": "é"}\n', encoding="utf-8")
    rows = list(read_rows(find_row_files(str(file), None, "data.train")))
    assert [(row.index, row.place, row.columns) for row in rows] == [(0, f"{file}:1", {"a": 1}), (1, f"{file}:4", {"a": "é"})]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1}\n{bad\n', r":2: not JSON"),
        ('{"a": 1}\n[1]\n', r":2: a JSON list where an object is needed"),
        ('[\n{"a": 1}\n]\n', r":1: not JSON"),
        ('{"a": 1e999}\n', r":1: column 'a' holds the number inf"),
        ('{"a": "\\ud800"}\n', r":1: column 'a' holds text with a lone surrogate"),
        ('{"a": ' + "[" * 100_000 + "\n", r":1: not JSON"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl" + match):
        columns_of(file)


def test_binary_file_is_no_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8 text with one JSON object a line"):
        columns_of(file)


def test_parquet_rows_become_plain_values(tmp_path: Path) -> None:
    schema = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    file = write_parquet(
        tmp_path / "rows.parquet",
        prompt=[MESSAGES, MESSAGES],
        answer=["2", None],
        numbers=[[1, 2], []],
        struct=[{"x": {"y": 1.5}}, None],
        mapping=pyarrow.array([[("a", 1)], None], schema),
        category=pyarrow.array(["u", "v"]).dictionary_encode(),
        flag=[True, None],
        share=[0.5, math.nan],
        day=[datetime.date(2024, 2, 29), None],
        moment=[datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC), None],
        price=[decimal.Decimal("12.50"), None],
    )
    first, second = columns_of(file)
    assert first == {
        "prompt": MESSAGES,
        "answer": "2",
        "numbers": [1, 2],
        "struct": {"x": {"y": 1.5}},
        "mapping": {"a": 1},
        "category": "u",
        "flag": True,
        "share": 0.5,
        "day": "2024-02-29",
        "moment": "2024-02-29T12:00:00+00:00",
        "price": "12.50",
    }
    assert {name for name, value in second.items() if value is None} == {*second} - {"prompt", "numbers", "category"}
    json.dumps([first, second], allow_nan=False)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ([1, b"\x00"][1:], r"row 1: column 'bad' holds a value of type bytes"),
        ([datetime.timedelta(seconds=1)], r"row 1: column 'bad' holds a value of type timedelta"),
        ([0.0, -math.inf], r"row 2: column 'bad' holds the number -inf"),
        ([[{"x": b"\x00"}]], r"row 1: column 'bad' holds a value of type bytes"),
    ],
)
def test_value_that_no_scorer_could_get_names_row_and_column(tmp_path: Path, column: list[object], match: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.parquet {match}"):
        columns_of(write_parquet(tmp_path / "rows.parquet", bad=column))


def test_object_with_keys_that_are_no_text_is_refused(tmp_path: Path) -> None:
    mapping: Any = pyarrow.array([[(1, 2)]], pyarrow.map_(pyarrow.int64(), pyarrow.int64()))
    with pytest.raises(DataError, match="an object with a key of type int"):
        columns_of(write_parquet(tmp_path / "rows.parquet", bad=mapping))


def test_map_that_has_a_key_twice_is_refused(tmp_path: Path) -> None:
    mapping: Any = pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as Parquet \(KeyError"):
        columns_of(write_parquet(tmp_path / "rows.parquet", bad=mapping))


def test_column_that_exists_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="has the column 'a' twice"):
        columns_of(tmp_path / "rows.parquet")


def test_numbers_that_are_subclasses_are_converted() -> None:
    class Whole(int):
        """As numpy's or an enum's."""

    assert plain_value(Whole(3)) == 3
    assert plain_value((1, True, None)) == [1, True, None]
    assert plain_value(True) is True


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1 and then something else PAR1", b"ARROW1\x00\x00 cut off", b"not a table"])
def test_broken_table_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / ("rows.arrow" if b"PAR1" not in content else "rows.parquet")
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.(arrow|parquet): cannot be read as (Arrow|Parquet)"):
        columns_of(file)


def test_cut_off_parquet_file_is_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "rows.parquet", a=list(range(1000)))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        columns_of(file)


def test_large_parquet_file_is_read_no_further_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "rows.parquet", a=list(range(3 * BATCH_ROWS)))
    sizes: list[int] = []
    whole = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, batch_size: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        for batch in whole(self, batch_size=batch_size):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    rows = read_rows(find_row_files(str(file), None, "data.train"))
    assert [next(rows).columns["a"] for _ in range(BATCH_ROWS + 1)] == list(range(BATCH_ROWS + 1))
    assert sizes == [BATCH_ROWS, BATCH_ROWS]


def test_first_rows_of_a_large_row_group_do_not_load_the_rest(tmp_path: Path) -> None:
    table = pyarrow.table({"a": [str(number) * 40 for number in range(100_000, 150_000)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", compression="none", use_dictionary=False)
    num_bytes = (tmp_path / "rows.parquet").stat().st_size
    before = pyarrow.total_allocated_bytes()
    rows = read_rows(find_row_files(str(tmp_path / "rows.parquet"), None, "data.train"))
    assert next(rows).columns["a"] == "100000" * 40
    assert pyarrow.total_allocated_bytes() - before < 0.5 * num_bytes


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams_are_read_in_parts(tmp_path: Path, stream: bool) -> None:
    table = pyarrow.table({"a": list(range(2 * BATCH_ROWS + 3))})
    file = tmp_path / "rows.arrow"
    with (ipc.new_stream if stream else ipc.new_file)(str(file), table.schema) as writer:
        writer.write_table(table)
    assert [row["a"] for row in columns_of(file)] == list(range(2 * BATCH_ROWS + 3))
