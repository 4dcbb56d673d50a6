"""Which files hold the rows of a path: a file, a folder of `Dataset.save_to_disk`, or a folder of JSONL and Parquet files.

A folder of files is read as the Hugging Face hub does: `train-00000-of-00002.parquet` belongs to the split train, in the folder
itself or in a folder below it; `train.jsonl` too, and so does every file of a folder `train`. A README's own list of files is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.errors import DataError

_SHARD = re.compile(r"^(?P<split>.+)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]+)?$")
_DATA_FOLDER = "data"
_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"


class RowFormat(StrEnum):
    """How a file stores rows."""

    JSONL = "JSONL"
    PARQUET = "Parquet"
    ARROW = "Arrow"


_FORMAT_OF_SUFFIX = {".jsonl": RowFormat.JSONL, ".parquet": RowFormat.PARQUET}
_MAGIC_FORMATS = {b"PAR1": RowFormat.PARQUET, b"ARROW1": RowFormat.ARROW}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFiles:
    """The files of one split, in the order of their rows."""

    files: tuple[Path, ...]
    format: RowFormat


def find_row_files(path: str, split: str | None, setting: str) -> RowFiles:
    """Find what a path of the configuration stands for.

    Args:
        path: a file or a folder.
        split: which split of a folder that has several; None where there is one.
        setting: name of the path in the configuration, such as data.train; its split is `<setting>_split`.
    Raises: DataError: nothing is there, or it is not clear which rows are meant; lists the splits.
    """
    place = Path(path)
    if place.is_dir():
        return _folder(place, split, setting)
    if not place.exists():
        raise DataError(f"{path}: no such file or folder: correct {setting}; a data set of the hub has to be downloaded first")
    if split is not None:
        raise DataError(f"{setting}_split is {split!r}, but {path} is a file and has no splits: leave it out")
    return RowFiles(files=(place,), format=_format_of(place))


def _format_of(file: Path) -> RowFormat:
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    for magic, row_format in _MAGIC_FORMATS.items():
        if start.startswith(magic):
            return row_format
    if file.suffix == ".arrow":
        return RowFormat.ARROW
    if file.suffix == ".parquet":
        raise DataError(f"{file}: no Parquet file, it does not start with PAR1: a download that did not finish, or a pointer of Git LFS?")
    return RowFormat.JSONL


def _folder(folder: Path, split: str | None, setting: str) -> RowFiles:
    if (folder / _DICT_FILE).is_file():
        splits = _read_object(folder / _DICT_FILE).get("splits")
        if not isinstance(splits, list) or not splits:
            raise DataError(f"{folder / _DICT_FILE}: names no splits: save the data set again")
        return _saved_dataset(folder / _choose(folder, [str(name) for name in splits], split, setting))
    if (folder / _STATE_FILE).is_file():
        own = _read_object(folder / _STATE_FILE).get("_split")
        if split is not None and split != own:
            known = "has no splits" if own is None else f"is the split {own!r}"
            raise DataError(f"{setting}_split is {split!r}, but the data set {folder} {known}: leave it out")
        return _saved_dataset(folder)
    return _hub_folder(folder, split, setting)


def _saved_dataset(folder: Path) -> RowFiles:
    state = _read_object(folder / _STATE_FILE)
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and isinstance(entry.get("filename"), str) for entry in entries):
        raise DataError(f"{folder / _STATE_FILE}: names no data files: save the data set again")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: the data set was saved with an index beside its rows: call flatten_indices() and save it again")
    # A name only, so that a state file cannot point out of its folder.
    files = tuple(folder / Path(entry["filename"]).name for entry in entries)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder}: {missing[0]} is missing, which {_STATE_FILE} names: copy the whole folder")
    return RowFiles(files=files, format=RowFormat.ARROW)


def _hub_folder(folder: Path, split: str | None, setting: str) -> RowFiles:
    found = sorted(file for file in folder.rglob("*") if file.suffix in _FORMAT_OF_SUFFIX and file.is_file() and not _hidden(file, folder))
    if not found:
        raise DataError(
            f"{folder}: a folder without .jsonl or .parquet files, and no saved data set ({_DICT_FILE} or {_STATE_FILE}): correct {setting}"
        )
    by_split: dict[str, list[Path]] = {}
    for file in found:
        by_split.setdefault(_split_of(file, folder), []).append(file)
    chosen = by_split[_choose(folder, sorted(by_split), split, setting)]
    return _checked_shards(folder, chosen, setting)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _split_of(file: Path, folder: Path) -> str:
    shard = _SHARD.match(file.stem)
    if shard is not None:
        return shard["split"]
    parent = file.parent
    return file.stem if parent == folder or parent.name == _DATA_FOLDER else parent.name


def _choose(folder: Path, splits: Sequence[str], split: str | None, setting: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split in splits:
        return str(split)
    problem = f"{setting}_split is not set" if split is None else f"{setting}_split is {split!r}"
    raise DataError(f"{folder} has the splits {', '.join(splits)}, and {problem}: set it to one of them")


def _checked_shards(folder: Path, files: Sequence[Path], setting: str) -> RowFiles:
    """One configuration, one format, no file missing."""
    parents = sorted({str(file.parent.relative_to(folder)) for file in files})
    if len(parents) > 1:
        raise DataError(f"{folder} has this split in the folders {', '.join(parents)}: set {setting} to one of them")
    formats = sorted({_FORMAT_OF_SUFFIX[file.suffix] for file in files})
    if len(formats) > 1:
        raise DataError(f"{folder} has this split as {' and as '.join(formats)}: keep one of them, or set {setting} to the file")
    shards = [shard for file in files if (shard := _SHARD.match(file.stem)) is not None]
    counts = {int(shard["count"]) for shard in shards}
    if shards and (len(counts) > 1 or len(files) != counts.pop() or len({int(shard["number"]) for shard in shards}) != len(files)):
        raise DataError(
            f"{folder}: {len(files)} files, such as {files[0].name}, are not the whole split: download the others, or remove stray ones"
        )
    for file in files:
        if _format_of(file) != formats[0]:
            raise DataError(f"{file}: the content is {_format_of(file)}: give the file its right name")
    return RowFiles(files=tuple(files), format=formats[0])


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}): save the data set again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: a JSON {type(content).__name__} where an object is needed: save the data set again")
    return content
