"""Which rows a path stands for: files, saved data sets (made by `datasets` itself), folders as on the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from shoal_coordinator.row_files import RowFormat, find_row_files
from shoal_coordinator.row_reading import read_rows

from shoal.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dataset` in two shards, `shuffled`, `dictionary` with two splits, `single` with one, `sequence` of messages, `split` train."""
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_list([{"prompt": MESSAGES, "answer": str(index)} for index in range(5)])
    rows.save_to_disk(folder / "dataset", num_shards=2)
    rows.shuffle(seed=1).select([0, 1]).save_to_disk(folder / "shuffled")
    datasets.DatasetDict({"train": rows, "test": rows.select([4])}).save_to_disk(folder / "dictionary")
    datasets.DatasetDict({"only": rows}).save_to_disk(folder / "single")
    text = datasets.Value("string")
    features = datasets.Features({"prompt": datasets.Sequence({"role": text, "content": text})})
    datasets.Dataset.from_list([{"prompt": {"role": ["user"], "content": ["hi"]}}], features=features).save_to_disk(folder / "sequence")
    datasets.Dataset.from_dict({"answer": ["x"]}, split="train").save_to_disk(folder / "split")
    return folder


def answers(path: Path, split: str | None = None) -> list[object]:
    return [row.columns["answer"] for row in read_rows(find_row_files(str(path), split, "data.train"))]


def write_parquet(path: Path, *values: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"answer": list(values)}), path)


def write_jsonl(path: Path, *values: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"answer": value}) + "\n" for value in values))


def test_saved_data_set_is_read_over_all_shards(saved: Path) -> None:
    source = find_row_files(str(saved / "dataset"), None, "data.train")
    assert (source.format, len(source.files)) == (RowFormat.ARROW, 2)
    rows = list(read_rows(source))
    assert [row.columns for row in rows] == [{"prompt": MESSAGES, "answer": str(index)} for index in range(5)]
    assert [row.index for row in rows] == list(range(5))
    assert rows[3].place.endswith("data-00001-of-00002.arrow row 1")


def test_shuffled_and_selected_data_set_keeps_its_order(saved: Path) -> None:
    import datasets

    assert answers(saved / "shuffled") == list(datasets.load_from_disk(saved / "shuffled")["answer"])


def test_split_of_a_dictionary_is_chosen(saved: Path) -> None:
    assert answers(saved / "dictionary", "test") == ["4"]
    assert len(answers(saved / "dictionary", "train")) == 5
    assert len(answers(saved / "single")) == 5


@pytest.mark.parametrize(
    ("split", "problem"), [(None, r"data\.train_split is not set"), ("validation", r"data\.train_split is 'validation'")]
)
def test_unclear_split_of_a_dictionary_lists_the_splits(saved: Path, split: str | None, problem: str) -> None:
    with pytest.raises(DataError, match=rf"dictionary has the splits train, test, and {problem}: set it to one of them"):
        answers(saved / "dictionary", split)


def test_split_where_there_are_none_is_refused(saved: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", "a")
    with pytest.raises(DataError, match="is a file and has no splits: leave it out"):
        answers(tmp_path / "rows.jsonl", "train")
    with pytest.raises(DataError, match="dataset has no splits: leave it out"):
        answers(saved / "dataset", "train")
    with pytest.raises(DataError, match="is the split 'train': leave it out"):
        answers(saved / "split", "test")
    assert answers(saved / "split", "train") == ["x"]


def test_sequence_of_messages_is_stored_as_a_struct_of_lists(saved: Path) -> None:
    (row,) = read_rows(find_row_files(str(saved / "sequence"), None, "data.train"))
    assert row.columns["prompt"] == {"role": ["user"], "content": ["hi"]}


def test_saved_data_set_with_a_missing_or_broken_file_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved / "dataset", tmp_path / "copy")
    shard = copy / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: cannot be read as Arrow"):
        answers(copy)
    shard.unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow is missing, which state\.json names"):
        answers(copy)
    (copy / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json: names no data files"):
        answers(copy)
    (copy / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json: cannot be read"):
        answers(copy)


def test_saved_index_beside_the_rows_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved / "dataset", tmp_path / "copy")
    state = json.loads((copy / "state.json").read_text())
    (copy / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError, match="saved with an index beside its rows"):
        answers(copy)


def test_dictionary_without_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(DataError, match="names no splits"):
        answers(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("[]")
    with pytest.raises(DataError, match="a JSON list where an object is needed"):
        answers(tmp_path)


@pytest.mark.parametrize("prefix", ["", "data/", "main/"])
def test_hub_folder_with_shards_of_parquet(tmp_path: Path, prefix: str) -> None:
    write_parquet(tmp_path / f"{prefix}train-00000-of-00002-0a1b2c3d.parquet", "a", "b")
    write_parquet(tmp_path / f"{prefix}train-00001-of-00002-0a1b2c3d.parquet", "c")
    write_parquet(tmp_path / f"{prefix}test-00000-of-00001.parquet", "d")
    (tmp_path / "README.md").write_text("about")
    write_parquet(tmp_path / ".cache" / "train-00000-of-00001.parquet", "hidden")
    assert answers(tmp_path, "train") == ["a", "b", "c"]
    assert answers(tmp_path, "test") == ["d"]
    with pytest.raises(DataError, match=r"has the splits test, train, and data\.train_split is not set"):
        answers(tmp_path)


def test_hub_folder_with_files_named_after_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", "a")
    write_jsonl(tmp_path / "test.jsonl", "b")
    assert (answers(tmp_path, "train"), answers(tmp_path, "test")) == (["a"], ["b"])


def test_hub_folder_with_folders_named_after_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train" / "0.parquet", "a")
    write_parquet(tmp_path / "data" / "train" / "1.parquet", "b")
    write_parquet(tmp_path / "data" / "test" / "0.parquet", "c")
    assert (answers(tmp_path, "train"), answers(tmp_path, "test")) == (["a", "b"], ["c"])


def test_single_file_of_a_folder_needs_no_split(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", "a")
    assert answers(tmp_path) == ["a"]


def test_hub_folder_that_is_not_clear_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main" / "train-00000-of-00001.parquet", "a")
    write_parquet(tmp_path / "socratic" / "train-00000-of-00001.parquet", "b")
    with pytest.raises(DataError, match=r"in the folders main, socratic: set data\.train to one of them"):
        answers(tmp_path)
    assert answers(tmp_path / "socratic") == ["b"]


def test_hub_folder_without_all_its_shards_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00001-of-00002.parquet", "a")
    with pytest.raises(DataError, match=r"1 files, such as train-00001-of-00002\.parquet, are not the whole split"):
        answers(tmp_path)
    write_parquet(tmp_path / "train-00000-of-00003.parquet", "a")
    with pytest.raises(DataError, match="are not the whole split"):
        answers(tmp_path)


def test_hub_folder_with_two_formats_of_a_split_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", "a")
    write_jsonl(tmp_path / "train.jsonl", "a")
    with pytest.raises(DataError, match="has this split as JSONL and as Parquet"):
        answers(tmp_path)


def test_file_is_known_by_its_content(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows", "a")
    assert answers(tmp_path / "rows") == ["a"]
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match=r"pointer\.parquet: no Parquet file, .*a pointer of Git LFS"):
        answers(tmp_path / "pointer.parquet")
    write_parquet(tmp_path / "wrong" / "rows.jsonl", "a")
    with pytest.raises(DataError, match="the content is Parquet: give the file its right name"):
        answers(tmp_path / "wrong")


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder: correct data\.train; a data set of the hub has to be downloaded"):
        answers(tmp_path / "none")
    with pytest.raises(DataError, match=r"a folder without \.jsonl or \.parquet files"):
        answers(tmp_path)


def test_saved_data_set_needs_neither_datasets_nor_torch(saved: Path) -> None:
    script = f"""
import sys
sys.modules["torch"] = sys.modules["datasets"] = sys.modules["pandas"] = None
from shoal_coordinator.row_files import find_row_files
from shoal_coordinator.row_reading import read_rows
assert len(list(read_rows(find_row_files({str(saved / "dataset")!r}, None, "data.train")))) == 5
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
