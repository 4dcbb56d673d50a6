"""From a configuration to rows, with a real tokenizer: BOS, limits, sources, stop tokens, vocabulary."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from shoal_coordinator.data_loading import PROGRESS_LOG_S, LoadedData, load_data, progress_log

from shoal.config.models import RunConfig, TelemetrySection
from shoal.errors import ConfigError, DataError
from shoal.telemetry.logs import setup_logging
from tests.helpers.tiny_tokenizers import BOS_ID, EOS_ID, LETTERS, WITH_BOS, WITHOUT_BOS, A, B, save_tokenizer, write_model_config

NUM_IDS = 3 + len(LETTERS)
PADDED = 16
"""Rows of the embedding: ids from NUM_IDS on are padding."""


def write_rows(folder: Path, *rows: Mapping[str, object], name: str = "train.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def make_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    merged: dict[str, dict[str, Any]] = {
        "run": {"id": "run", "folder": "runs"},
        "model": {"path": str(folder)},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"prompts_per_step": 1, "max_new_tokens": 4},
    }
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    return RunConfig.model_validate(merged)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights, and one training row."""
    save_tokenizer(tmp_path, adds_bos=True, template=WITH_BOS, added=("<end>",))
    write_model_config(tmp_path, vocab_size=PADDED)
    write_rows(tmp_path, {"prompt": "ab", "answer": "b"})
    return tmp_path


def prompts(data: LoadedData) -> list[list[int]]:
    return [row.prompt_ids.tolist() for row in data.train]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(WITH_BOS, [{"role": "user", "content": "ab"}]), (WITHOUT_BOS, [{"role": "user", "content": "ab"}]), (None, "ab")],
)
def test_prompt_has_exactly_one_bos_whoever_adds_it(tmp_path: Path, template: str | None, prompt: object) -> None:
    save_tokenizer(tmp_path, adds_bos=True, template=template)
    write_model_config(tmp_path, vocab_size=PADDED)
    write_rows(tmp_path, {"prompt": prompt})
    assert prompts(load_data(make_config(tmp_path))) == [[BOS_ID, A, B]]


def test_text_rows_jsonl_parquet_and_message_rows_give_the_same_ids(folder: Path) -> None:
    messages = [{"role": "user", "content": "ab"}]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [messages], "answer": ["b"]}), folder / "rows.parquet")
    of_table = load_data(make_config(folder, data={"train": str(folder / "rows.parquet")}))
    write_rows(folder, {"prompt": messages, "answer": "b"})
    of_lines = load_data(make_config(folder))
    assert prompts(of_table) == prompts(of_lines) == [[BOS_ID, A, B]]
    assert of_table.train[0].text == of_lines.train[0].text == "<bos>ab"
    assert of_table.train[0].row == of_lines.train[0].row == {"prompt": messages, "answer": "b"}


def lengths(data: LoadedData) -> list[int]:
    return [row.prompt_ids.size for row in data.train]


@pytest.mark.parametrize(
    ("overlong", "expected"), [("filter", [15, 16]), ("truncate_left", [15, 16, 16]), ("truncate_right", [15, 16, 16])]
)
def test_limit_counts_after_the_template(folder: Path, overlong: str, expected: list[int]) -> None:
    # With BOS, which the template adds, these are 15, 16 and 17 tokens.
    chats: Sequence[Mapping[str, object]] = [
        {"prompt": [{"role": "user", "content": ("abcdefgh" * 3)[:length]}]} for length in (14, 15, 16)
    ]
    write_rows(folder, *chats)
    rule = {"max_prompt_tokens": 16, "overlong": overlong}
    data = load_data(make_config(folder, data=rule))
    assert lengths(data) == expected
    assert all(row.prompt_ids.tolist().count(BOS_ID) == 1 and row.prompt_ids[0] == BOS_ID for row in data.train)
    with pytest.raises(DataError, match=r"train\.jsonl:3: the prompt has 17 tokens"):
        load_data(make_config(folder, data={**rule, "overlong": "error"}))


def test_nothing_left_or_less_than_a_batch_is_an_error(folder: Path) -> None:
    write_rows(folder, *({"prompt": "abcd"} for _ in range(3)))
    with pytest.raises(DataError, match="0 of 3 rows are usable"):
        load_data(make_config(folder, data={"max_prompt_tokens": 4, "overlong": "filter"}))
    with pytest.raises(DataError, match=r"3 of 3 rows are usable .* a batch needs 4"):
        load_data(make_config(folder, rollout={"prompts_per_step": 4}))


def test_sources_are_checked_in_held_out_rows_too(folder: Path) -> None:
    write_rows(folder, {"prompt": "a", "data_source": "math"})
    held_out = write_rows(folder, {"prompt": "a", "data_source": "math"}, {"prompt": "b", "data_source": "poems"}, name="held_out.jsonl")
    sections: dict[str, dict[str, Any]] = {"reward": {"sources": {"math": "exact", "code": "run"}}}
    assert len(load_data(make_config(folder, **sections)).train) == 1
    with pytest.raises(DataError, match=r"held_out\.jsonl:2: 'data_source' is 'poems', .*known sources: code, math"):
        load_data(make_config(folder, data={"held_out": held_out}, **sections))


def test_evaluation_has_rows_a_split_and_a_limit_of_its_own(folder: Path) -> None:
    for split, num in (("train", 1), ("test", 3)):
        write_rows(folder, *({"prompt": "abcd"} for _ in range(num)), name=f"{split}.jsonl")
    own = {"held_out": str(folder), "held_out_split": "test"}
    data = load_data(make_config(folder, data=own, evaluation={"max_prompts": 2}))
    assert (len(data.train), len(data.held_out)) == (1, 2)
    with pytest.raises(DataError, match=r"test\.jsonl:1: .* context 64 less evaluation\.max_new_tokens 60"):
        load_data(make_config(folder, data=own, evaluation={"max_new_tokens": 60}))
    with pytest.raises(ConfigError, match=r"evaluation\.max_new_tokens is 64, but the context"):
        load_data(make_config(folder, data=own, evaluation={"max_new_tokens": 64}))


def test_padding_of_the_embedding_is_no_part_of_the_vocabulary(folder: Path) -> None:
    assert load_data(make_config(folder)).vocab_size == NUM_IDS + 1


def test_stop_ids_are_those_of_model_tokenizer_and_configuration(folder: Path) -> None:
    end = NUM_IDS
    assert load_data(make_config(folder)).stop_token_ids == (EOS_ID,)
    own = {"stop_token_ids": (B, EOS_ID), "stop_tokens": ("<end>", "a")}
    assert load_data(make_config(folder, rollout=own)).stop_token_ids == (EOS_ID, A, B, end)
    write_model_config(folder, vocab_size=PADDED, eos_token_id=[A, 999])
    # 999 can never be sampled, and a server would refuse it.
    assert load_data(make_config(folder)).stop_token_ids == (EOS_ID, A)


@pytest.mark.parametrize(
    ("rollout", "match"),
    [
        ({"stop_token_ids": (NUM_IDS + 1,)}, r"rollout\.stop_token_ids has 12; only ids within 0\.\.11 are ever sampled"),
        ({"stop_token_ids": (-1,)}, r"rollout\.stop_token_ids has -1"),
        ({"stop_tokens": ("ab",)}, r"rollout\.stop_tokens has 'ab', which is not one token .*, but the 2 tokens \[3, 4\]"),
        ({"stop_tokens": ("x",)}, r"rollout\.stop_tokens has 'x', .*, but unknown to it"),
        ({"stop_tokens": ("",)}, r"rollout\.stop_tokens has '', .*, but unknown to it"),
    ],
)
def test_stop_token_that_cannot_end_a_response_is_refused(folder: Path, rollout: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_data(make_config(folder, rollout=rollout))


def test_stop_text_behind_the_models_vocabulary_is_refused(folder: Path) -> None:
    write_model_config(folder, vocab_size=NUM_IDS)
    with pytest.raises(ConfigError, match=rf"has '<end>', which is id {NUM_IDS}; only ids within 0\.\.10"):
        load_data(make_config(folder, rollout={"stop_tokens": ("<end>",)}))


def test_prompt_of_an_id_behind_the_models_vocabulary_is_refused(folder: Path) -> None:
    write_model_config(folder, vocab_size=NUM_IDS)
    write_rows(folder, {"prompt": "a<end>"})
    with pytest.raises(DataError, match=rf"train\.jsonl:1: token id {NUM_IDS} is outside the model's vocabulary of {NUM_IDS}"):
        load_data(make_config(folder))


def test_progress_is_logged_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("coordinator", TelemetrySection(), stream=sys.stdout)
    times = iter([0.0, PROGRESS_LOG_S - 1, PROGRESS_LOG_S, PROGRESS_LOG_S, PROGRESS_LOG_S + 1])
    report = progress_log("train.jsonl", lambda: next(times))
    for num_read in (1, 2, 3):
        report(num_read, num_read)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) | {"event": "data_loading", "path": "train.jsonl", "num_read": 2, "num_usable": 2} == json.loads(line)
