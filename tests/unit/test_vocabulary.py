"""The ids that can be sampled, from every kind of tokenizer that a model's folder may hold."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shoal.errors import ConfigError
from shoal.vocabulary import sampled_vocab_size

WORDS = [f"w{index}" for index in range(60)]
IDS = {word: index for index, word in enumerate(WORDS)}
MODELS = {
    "bpe": models.BPE(vocab=IDS, merges=[]),
    "word level": models.WordLevel(vocab=IDS),
    "word piece": models.WordPiece(vocab=IDS),
    "unigram": models.Unigram([(word, -1.0) for word in WORDS], unk_id=0),
}


def _save(folder: Path, model: models.Model, added: int = 0) -> str:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(f"<{index}>", special=True) for index in range(added)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def _write(folder: Path, name: str, content: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("added", [0, 2])
def test_sampled_vocab_size_is_the_tokenizers_own(tmp_path: Path, model: models.Model, added: int) -> None:
    path = _save(tmp_path / "model", model, added)
    assert sampled_vocab_size(path, 64) == 60 + added == len(PreTrainedTokenizerFast.from_pretrained(path))
    assert sampled_vocab_size(path, 60 + added) == 60 + added
    assert sampled_vocab_size(path, 50) == 50, "a tokenizer larger than the model has no rows for its last ids"


def test_sampled_vocab_size_counts_tokens_that_transformers_adds_beside_the_file(tmp_path: Path) -> None:
    path = _save(tmp_path / "model", MODELS["bpe"])
    _write(tmp_path / "model", "tokenizer_config.json", {"added_tokens_decoder": {"61": {"content": "<late>"}, "0": {"content": "w0"}}})
    assert sampled_vocab_size(path, 64) == 62
    _write(tmp_path / "model", "added_tokens.json", {"<later>": 62})
    assert sampled_vocab_size(path, 64) == 63


def test_sampled_vocab_size_goes_up_to_the_largest_id_of_a_tokenizer_with_holes(tmp_path: Path) -> None:
    path = _save(tmp_path / "model", models.WordLevel(vocab={"a": 0, "b": 40}))
    assert sampled_vocab_size(path, 64) == 41


def test_sampled_vocab_size_without_tokenizer_json_reads_vocab_json(tmp_path: Path) -> None:
    path = _write(tmp_path / "model", "vocab.json", IDS)
    _write(tmp_path / "model", "merges.txt", "#version: 0.2\n")
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "w0")
    _write(tmp_path / "model", "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **special})
    assert sampled_vocab_size(path, 64) == 60 == max(AutoTokenizer.from_pretrained(path).get_vocab().values()) + 1
    _write(tmp_path / "model", "added_tokens.json", {"<pad>": 60})
    assert sampled_vocab_size(path, 64) == 61


def test_sampled_vocab_size_without_tokenizer_json_counts_the_pieces_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc abd bcd " * 30]), model_writer=model, vocab_size=17, minloglevel=2, hard_vocab_limit=False
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    assert 5 < size < 64
    assert sampled_vocab_size(str(tmp_path), 64) == size
    _write(tmp_path, "added_tokens.json", {"<pad>": size})
    assert sampled_vocab_size(str(tmp_path), 64) == size + 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.model": "IQ== 0\nIg== 1\n"},
        {"tokenizer.model": "\n\x7fcut"},
        {"vocab.json": IDS, "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}},
        {"vocab.json": {}},
        {"tokenizer.json": {"model": {"vocab": {}}}},
    ],
    ids=["nothing", "tiktoken", "cut", "own code", "empty", "empty json"],
)
def test_sampled_vocab_size_is_everything_where_files_do_not_tell(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        _write(tmp_path, name, content)
    assert sampled_vocab_size(str(tmp_path), 64) == 64


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", []),
        ("tokenizer.json", {"version": "1.0"}),
        ("tokenizer.json", {"model": {"vocab": 3}}),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}}}),
        ("tokenizer.json", {"model": {"vocab": {"a": None}}}),
        ("tokenizer.json", {"model": {"vocab": IDS}, "added_tokens": [{"content": "<x>"}]}),
        ("vocab.json", "[1"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}),
        ("added_tokens.json", {"<x>": "y"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sampled_vocab_size_refuses_a_broken_file_by_name(tmp_path: Path, name: str, content: object) -> None:
    if name.startswith(("added", "tokenizer_config")):
        _save(tmp_path, MODELS["bpe"])
    _write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read as a tokenizer.*restore"):
        sampled_vocab_size(str(tmp_path), 64)


def test_sampled_vocab_size_of_a_model_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    _save(snapshot, MODELS["unigram"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert sampled_vocab_size("some/model", 64) == 60
    assert sampled_vocab_size("some/other", 64) == 64
    with pytest.raises(ConfigError, match="neither a folder nor a Hugging Face id"):
        sampled_vocab_size("./no/such/folder", 64)


def test_sampled_vocab_size_of_a_large_tokenizer_is_quick(tmp_path: Path) -> None:
    words = {f"▁token{index}": index for index in range(100_000)}
    tokenizer = {"added_tokens": [], "model": {"type": "BPE", "vocab": words, "merges": [[word[:3], word[3:]] for word in words]}}
    path = _write(tmp_path, "tokenizer.json", tokenizer)
    start_s = time.process_time()
    assert sampled_vocab_size(path, 256_000) == 100_000
    # About 0.1 s: three services do it at their start.
    assert time.process_time() - start_s < 1.5
