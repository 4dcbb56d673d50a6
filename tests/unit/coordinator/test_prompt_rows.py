"""From rows to prompts: columns, messages, sources, the length rule."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from shoal_coordinator.prompt_rows import LengthRule, held_out_rows, load_prompt_rows, prompt_of, train_rows
from shoal_coordinator.prompts import PromptRow

from shoal.config.models import DataSection
from shoal.errors import DataError
from shoal.types import Int32Array
from tests.helpers.coordinator_fakes import FakeTokenizer

Overlong = Literal["error", "filter", "truncate_left", "truncate_right"]
BOS_ID = 1


class BosTokenizer(FakeTokenizer):
    """Character codes behind a BOS."""

    bos_token_id = BOS_ID

    def encode(self, texts: Collection[str]) -> list[Int32Array]:
        """BOS and one id a character."""
        return [np.array([BOS_ID, *map(ord, text)], np.int32) for text in texts]


def write(path: Path, *rows: object) -> str:
    file = path / "rows.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


def load(
    path: str,
    *,
    longest: int = 16,
    overlong: Overlong = "error",
    max_context: int | None = None,
    vocab_size: int = 128,
    min_rows: int = 1,
    max_rows: int | None = None,
    sources: Collection[str] = (),
    tokenizer: FakeTokenizer | None = None,
    **columns: str,
) -> list[PromptRow]:
    data = DataSection.model_validate({"train": path, "max_prompt_tokens": longest, "overlong": overlong, **columns})
    rule = LengthRule(max_prompt_tokens=longest, overlong=overlong, vocab_size=vocab_size, max_context=max_context, max_new_tokens=4)
    return load_prompt_rows(train_rows(data, sources), tokenizer or FakeTokenizer(), rule, min_rows=min_rows, max_rows=max_rows)


def test_rows_keep_ids_text_and_all_columns(tmp_path: Path) -> None:
    (row,) = load(write(tmp_path, {"prompt": "1+1=", "answer": "2"}))
    assert (row.row_index, row.text, row.row) == (0, "1+1=", {"prompt": "1+1=", "answer": "2"})
    assert row.prompt_ids.tolist() == [49, 43, 49, 61]
    assert row.prompt_ids.dtype == np.int32


def test_chat_rows_blank_lines_and_another_column(tmp_path: Path) -> None:
    path = write(tmp_path, {"chat": [{"role": "user", "content": "hi"}]}, "", {"chat": "ho"})
    assert [(row.row_index, row.text) for row in load(path, prompt_key="chat")] == [(0, "hi"), (1, "ho")]


def test_length_rule_keeps_up_to_the_limit_and_refuses_above(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": "x" * length} for length in (15, 16, 17)))
    assert [row.prompt_ids.size for row in load(path, overlong="filter")] == [15, 16]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt has 17 tokens, more than data\.max_prompt_tokens 16"):
        load(path)


@pytest.mark.parametrize(("overlong", "kept"), [("truncate_left", "bcdefghijklmnopq"), ("truncate_right", "abcdefghijklmnop")])
def test_cut_prompt_keeps_one_end_and_the_text_stays_whole(tmp_path: Path, overlong: Overlong, kept: str) -> None:
    texts = ["abcdefghijklmnopq"[:length] for length in (15, 16, 17)]
    rows = load(write(tmp_path, *({"prompt": text} for text in texts)), overlong=overlong)
    assert ["".join(map(chr, row.prompt_ids)) for row in rows] == [texts[0], texts[1], kept]
    assert [row.text for row in rows] == texts


@pytest.mark.parametrize(
    ("overlong", "longest", "kept"),
    [
        ("truncate_left", 4, [BOS_ID, *map(ord, "cde")]),
        ("truncate_right", 4, [BOS_ID, *map(ord, "abc")]),
        ("truncate_left", 6, [BOS_ID, *map(ord, "abcde")]),
        ("truncate_left", 1, [BOS_ID]),
        ("truncate_right", 1, [BOS_ID]),
    ],
)
def test_cut_prompt_keeps_its_bos_which_counts(tmp_path: Path, overlong: Overlong, longest: int, kept: list[int]) -> None:
    (row,) = load(write(tmp_path, {"prompt": "abcde"}), overlong=overlong, longest=longest, tokenizer=BosTokenizer())
    assert row.prompt_ids.tolist() == kept
    assert row.prompt_ids.dtype == np.int32


@pytest.mark.parametrize("overlong", ["error", "filter", "truncate_left", "truncate_right"])
def test_bos_counts_against_the_limit(tmp_path: Path, overlong: Overlong) -> None:
    path = write(tmp_path, {"prompt": "x" * 15})
    assert load(path, overlong=overlong, tokenizer=BosTokenizer())[0].prompt_ids.size == 16


def test_prompt_and_response_must_fit_the_context(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x" * 9})
    assert len(load(path, max_context=13)) == 1
    with pytest.raises(DataError, match=r"context 12 less rollout\.max_new_tokens 4"):
        load(path, max_context=12)
    assert load(path, max_context=12, overlong="truncate_left")[0].prompt_ids.size == 8


def test_everything_filtered_or_less_than_a_batch_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": "x" * length} for length in (15, 16, 17)))
    with pytest.raises(DataError, match="0 of 3 rows are usable"):
        load(path, longest=4, overlong="filter")
    with pytest.raises(DataError, match=r"3 of 3 rows .* a batch needs 4"):
        load(path, longest=20, min_rows=4)


def test_max_rows_counts_usable_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x" * 17}, {"prompt": "a"}, {"prompt": "b"}, "{bad")
    assert [row.text for row in load(path, overlong="filter", max_rows=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ((), "has no rows"),
        (("", "  "), "has no rows"),
        (({"prompt": "a"}, {"question": "b"}), r"rows\.jsonl:2: no column 'prompt' \(has \['question'\]\)"),
        (({"prompt": 3},), r"rows\.jsonl:1: 'prompt' is of type int"),
        (({"prompt": None},), r"rows\.jsonl:1: 'prompt' is null"),
        (({"prompt": []},), r"rows\.jsonl:1: 'prompt' is an empty list"),
        (({"prompt": ["a"]},), r"rows\.jsonl:1: 'prompt' message 1 is of type str"),
        (({"prompt": [{"content": "a"}]},), r"message 1 has no role \(has \['content'\]\)"),
        (({"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]},), r"message 2 has no content \(has \['role'\]\)"),
        (({"prompt": ""},), r"rows\.jsonl:1: the prompt has no tokens"),
        (({"prompt": "é"},), r"rows\.jsonl:1: token id 233 is outside the model's vocabulary of 128"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, lines: tuple[object, ...], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load(write(tmp_path, *lines))


def test_messages_lose_the_keys_that_a_table_filled_in() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompt = prompt_of({"prompt": [{"role": "user", "content": "a", "tool_calls": None}, call]}, "prompt")
    assert prompt == [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]


def test_struct_of_lists_is_a_list_of_messages() -> None:
    columns = {"role": ["user", "assistant"], "content": ["a", "b"], "name": None}
    assert prompt_of({"p": columns}, "p") == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="is of type dict"):
        prompt_of({"p": {"role": ["user"], "content": ["a", "b"]}}, "p")


def test_answer_column_becomes_answer(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "solution": "7", "answer": "how"}, {"prompt": "b", "solution": [1, 2]})
    assert [row.row["answer"] for row in load(path, answer_key="solution")] == ["7", [1, 2]]
    assert load(path, answer_key="solution")[0].row["solution"] == "7"
    assert "answer" not in load(path)[1].row


@pytest.mark.parametrize(
    ("row", "match"),
    [({"prompt": "a"}, r"rows\.jsonl:2: no column 'solution'"), ({"prompt": "a", "solution": None}, r"rows\.jsonl:2: 'solution' is null")],
)
def test_row_without_its_answer_is_refused(tmp_path: Path, row: dict[str, object], match: str) -> None:
    with pytest.raises(DataError, match=match):
        load(write(tmp_path, {"prompt": "a", "solution": "1"}, row), answer_key="solution")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "data_source": "poems"}, r"rows\.jsonl:2: 'data_source' is 'poems', .*known sources: code, math"),
        ({"prompt": "a", "data_source": None}, r"rows\.jsonl:2: 'data_source' is None"),
        ({"prompt": "a", "data_source": 3}, r"rows\.jsonl:2: 'data_source' is 3"),
        ({"prompt": "a"}, r"rows\.jsonl:2: no column 'data_source' .*known sources: code, math"),
    ],
)
def test_unknown_source_is_refused_at_load(tmp_path: Path, row: dict[str, object], match: str) -> None:
    path = write(tmp_path, {"prompt": "a", "data_source": "math"}, row)
    with pytest.raises(DataError, match=match):
        load(path, sources=("math", "code"))
    assert len(load(path)) == 2


def test_source_column_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "kind": "math"})
    assert load(path, sources=("math",), source_key="kind")[0].row["kind"] == "math"


def test_held_out_rows_are_those_of_their_own_path(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"})
    assert held_out_rows(DataSection(train=path), ()) is None
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file or folder: correct data\.held_out"):
        held_out_rows(DataSection(train=path, held_out=str(tmp_path / "nothing.jsonl")), ())


def test_tokenising_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_coordinator.prompt_rows.TOKENISE_CHUNK", 2)
    path = write(tmp_path, *({"prompt": "x" * length} for length in (1, 5, 1, 1, 1)))
    told: list[tuple[int, int]] = []
    rule = LengthRule(max_prompt_tokens=4, overlong="filter", vocab_size=128, max_context=None, max_new_tokens=4)
    source = train_rows(DataSection(train=path), ())
    load_prompt_rows(source, FakeTokenizer(), rule, progress=lambda num_read, num_usable: told.append((num_read, num_usable)))
    assert told == [(2, 1), (4, 3), (5, 4)]
