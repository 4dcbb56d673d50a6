"""BOS, templates, decoding, model limits; with real tokenizers built here."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shoal_coordinator.tokenizing import HuggingFaceTokenizer, ModelLimits, load_tokenizer, read_model_limits, valid_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shoal.errors import ConfigError, DataError
from tests.helpers.tiny_tokenizers import BOS_ID as BOS
from tests.helpers.tiny_tokenizers import WITH_BOS, WITHOUT_BOS, A, B, save_tokenizer

CHAT = [{"role": "user", "content": "ab"}]

SaveTokenizer = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> SaveTokenizer:
    return functools.partial(save_tokenizer, tmp_path)


def ids_of(tokenizer: HuggingFaceTokenizer, prompt: str | list[dict[str, object]]) -> list[int]:
    (ids,) = tokenizer.encode([tokenizer.text(prompt)])
    return list(map(int, ids))


@pytest.mark.parametrize(
    ("template", "prompt"), [(WITH_BOS, CHAT), (WITHOUT_BOS, CHAT), (None, "ab"), (WITH_BOS, "ab"), (None, "<bos><bos>ab")]
)
def test_tokenizer_that_adds_bos_gives_exactly_one(
    save: SaveTokenizer, template: str | None, prompt: str | list[dict[str, object]]
) -> None:
    tokenizer = load_tokenizer(str(save(adds_bos=True, template=template)))
    assert ids_of(tokenizer, prompt) == [BOS, A, B]


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [(WITH_BOS, CHAT, [BOS, A, B]), (WITHOUT_BOS, CHAT, [A, B]), (None, "ab", [A, B]), (None, "<bos><bos>ab", [BOS, A, B])],
)
def test_tokenizer_that_adds_no_bos_leaves_it_to_the_template(
    save: SaveTokenizer, template: str | None, prompt: str | list[dict[str, object]], expected: list[int]
) -> None:
    tokenizer = load_tokenizer(str(save(adds_bos=False, template=template)))
    assert ids_of(tokenizer, prompt) == expected


def test_tokenizer_without_bos_adds_none(save: SaveTokenizer) -> None:
    assert ids_of(load_tokenizer(str(save(adds_bos=False, bos=None))), "ab") == [A, B]


def test_prompt_of_nothing_but_bos_keeps_one(save: SaveTokenizer) -> None:
    tokenizer = load_tokenizer(str(save(adds_bos=True)))
    assert ids_of(tokenizer, "") == [BOS]
    assert ids_of(tokenizer, "<bos>") == [BOS]


def test_decode_leaves_special_tokens_out(save: SaveTokenizer) -> None:
    tokenizer = load_tokenizer(str(save(adds_bos=True)))
    assert tokenizer.decode(tokenizer.encode(["ab<eos>", "b"])) == ["ab", "b"]
    assert tokenizer.decode([]) == []
    assert tokenizer.encode([]) == []


def test_chat_without_template_and_refusing_template_are_data_errors(save: SaveTokenizer) -> None:
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(str(save(adds_bos=True))).text(CHAT)
    refuses = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        load_tokenizer(str(save(adds_bos=True, template=refuses))).text(CHAT)


def test_token_is_known_by_its_entry_or_by_what_it_becomes() -> None:
    from transformers import PreTrainedTokenizerFast

    # As byte-level vocabularies write a line break and a blank.
    vocabulary = {"Ċ": 0, "Ġ": 1, "a": 2, "</s>": 3}
    byte_level = Tokenizer(models.BPE(vocabulary, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="</s>"))  # noqa: S106
    found = {text: tokenizer.ids_of_token(text) for text in ("\n", "Ċ", "a", "</s>", "a a", "x")}
    assert found == {"\n": [0], "Ċ": [0], "a": [2], "</s>": [3], "a a": [2, 1, 2], "x": []}


def test_answer_is_asked_for_or_continued_where_the_assistant_has_begun(save: SaveTokenizer) -> None:
    template = (
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = load_tokenizer(str(save(adds_bos=True, template=template)))
    assert tokenizer.text(CHAT) == "[user]ab[end][assistant]"
    assert tokenizer.text([*CHAT, {"role": "assistant", "content": "b"}]) == "[user]ab[end][assistant]b"


def test_hash_changes_with_the_template(save: SaveTokenizer) -> None:
    one = load_tokenizer(str(save(adds_bos=True, template=WITH_BOS))).tokenizer_hash
    assert one == load_tokenizer(str(save(adds_bos=True, template=WITH_BOS))).tokenizer_hash
    assert one != load_tokenizer(str(save(adds_bos=True, template=WITHOUT_BOS))).tokenizer_hash


def test_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path .* no readable tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path .* no readable tokenizer"):
        load_tokenizer(str(tmp_path))


def write_config(folder: Path, config: object, generation: object = None) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def test_limits_come_from_the_configs(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 2}, {"eos_token_id": [2, 5]})
    assert read_model_limits(path) == ModelLimits(vocab_size=9, max_context=64, eos_token_ids=(2, 5))


def test_limits_without_generation_config_or_context(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"text_config": {"vocab_size": 9, "eos_token_id": 2}})
    assert read_model_limits(path) == ModelLimits(vocab_size=9, max_context=None, eos_token_ids=(2,))


@pytest.mark.parametrize(("content", "match"), [(None, "no readable config.json"), ("{}", "no vocab_size"), ("{", "unreadable")])
def test_bad_model_config_is_named(tmp_path: Path, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=match):
        read_model_limits(str(tmp_path))


@pytest.mark.parametrize("torch_is_installed", [True, False])
def test_tokenising_imports_no_torch(save: SaveTokenizer, torch_is_installed: bool) -> None:
    path = write_config(save(adds_bos=True, template=WITH_BOS), {"vocab_size": 5})
    script = f"""
import sys
if not {torch_is_installed}:
    sys.modules["torch"] = None
from shoal_coordinator.tokenizing import load_tokenizer, read_model_limits
tokenizer = load_tokenizer({path!r})
ids = tokenizer.encode([tokenizer.text([{{"role": "user", "content": "ab"}}])])
read_model_limits({path!r})
assert ids[0].tolist() == [1, 3, 4], ids
assert tokenizer.decode(ids) == ["ab"]
assert sys.modules.get("torch") is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("plain", "plain"),
        ("grün ∑ 😀", "grün ∑ 😀"),
        ("a\0b", "a\0b"),
        ("x\ud800y", "x\ufffdy"),
        ("\udcff", "\ufffd"),
        ("\ud83d\ude00", "😀"),
    ],
)
def test_text_for_scorers_is_valid_unicode(text: str, valid: str) -> None:
    assert valid_text(text) == valid
    valid_text(text).encode()


def test_ids_that_are_no_utf8_decode_to_text_that_can_be_sent() -> None:
    """A byte-level vocabulary, and a tokenizer written in Python that smuggles bytes out as surrogates."""

    class Smuggling:
        bos_token_id = None
        chat_template = None
        add_bos_token = False

        def get_vocab(self) -> dict[str, int]:
            return {}

        def batch_decode(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
            return [bytes(own).decode("utf-8", "surrogateescape") for own in ids]

    tokenizer = HuggingFaceTokenizer(Smuggling())
    texts = tokenizer.decode([np.array([0x61, 0xFF, 0xC3], np.int32), np.array([0xC3, 0xA4], np.int32)])
    assert texts == ["a\ufffd\ufffd", "ä"]


def test_every_byte_of_a_byte_level_vocabulary_decodes_to_valid_text(tmp_path: Path) -> None:
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for text in tokenizer.decode([np.array([number], np.int32) for number in vocab.values()]):
        text.encode()
