"""Reads rows one after another, so that no more of a large file is held than is used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal_coordinator.row_files import RowFiles, RowFormat
from shoal_coordinator.row_values import plain_row

BATCH_ROWS = 1024
"""Rows of a Parquet file that are decoded at once."""
BUFFER_BYTES = 1 << 20
"""What is read ahead of each column of a Parquet file; without it whole columns of a row group would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a data set. index counts rows over all files; place is file and line or row, both from 1, for messages."""

    index: int
    place: str
    columns: dict[str, object]


def read_rows(source: RowFiles) -> Iterator[Row]:
    """Read the rows of all files, in order; those of a saved data set too.

    Raises: DataError: an unreadable file, a line that is no JSON object, a value that no scorer could get. Names file and row.
    """
    index = 0
    for file in source.files:
        for place, columns in _read_file(file, source.format):
            try:
                yield Row(index=index, place=place, columns=plain_row(columns))
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            index += 1


def _read_file(file: Path, row_format: RowFormat) -> Iterator[tuple[str, Mapping[str, object]]]:
    if row_format is RowFormat.JSONL:
        return _read_jsonl(file)
    return ((f"{file} row {number}", row) for number, row in enumerate(_read_table(file, row_format), start=1))


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    try:
        # A byte order mark, as some editors write, is no part of the first object.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", _parse(f"{file}:{number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: cannot be read ({error}): it should be UTF-8 text with one JSON object a line, or a Parquet file"
        ) from error


def _parse(place: str, line: str) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}): correct the line or remove it; a row is one JSON object on one line") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: a JSON {type(value).__name__} where an object is needed: write one object a line")
    return value


def _read_table(file: Path, row_format: RowFormat) -> Iterator[Mapping[str, object]]:
    # Costs a moment, which runs on JSONL need not pay.
    import pyarrow

    batches = _parquet_batches(file) if row_format is RowFormat.PARQUET else _arrow_batches(file)
    try:
        for batch in batches:
            _check_columns(file, batch.schema.names)
            yield from batch.to_pylist(maps_as_pydicts="strict")
    # KeyError: a map has a key twice. ValueError: a timestamp that Python's types cannot hold.
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise DataError(f"{file}: cannot be read as {row_format} ({type(error).__name__}: {reason}): write the file again") from error


def _parquet_batches(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as opened:
        yield from opened.iter_batches(batch_size=BATCH_ROWS)


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc

    with pyarrow.memory_map(str(file)) as mapped:
        try:
            reader = ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            opened = ipc.open_file(mapped)
            reader = (opened.get_batch(number) for number in range(opened.num_record_batches))
        for batch in reader:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _check_columns(file: Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file}: has the column {twice[0]!r} twice: rename one of them")
