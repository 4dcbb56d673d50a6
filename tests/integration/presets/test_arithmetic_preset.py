"""The arithmetic preset as the demo uses it: a folder that AutoModel and AutoTokenizer load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shoal_trainer.presets import PRESET_VERSION
from shoal_trainer.presets.__main__ import main
from shoal_trainer.presets.arithmetic import build_arithmetic
from shoal_trainer.presets.problems import make_problems
from shoal_trainer.presets.warmup import WarmUpSettings, encode_rows, greedy_accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORT = WarmUpSettings(max_steps=4, evaluate_every=2, batch_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preset")
    build_arithmetic(folder, seed=5, settings=SHORT)
    return folder


def rows_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_preset_folder_loads_with_the_auto_classes(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 512
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 5e6
    special = [model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id]
    assert special == [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(special)) == 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="


def test_preset_rows_are_the_run_s_parts_only(folder: Path) -> None:
    problems = make_problems(5)
    assert rows_of(folder / "train.jsonl") == list(problems.train)
    assert rows_of(folder / "held_out.jsonl") == list(problems.held_out)


def test_preset_facts_match_the_saved_model(folder: Path) -> None:
    preset = json.loads((folder / "preset.json").read_text())
    assert (preset["name"], preset["version"], preset["seed"]) == ("arithmetic", PRESET_VERSION, 5)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert preset["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert preset["held_out_accuracy"] == round(greedy_accuracy(model, encode_rows(rows_of(folder / "held_out.jsonl"), tokenizer)), 4)


def test_preset_one_forward_says_what_generate_says(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    # An untrained policy answers nothing right, so it is asked for what it says itself.
    prompts = [str(row["prompt"]) for row in rows_of(folder / "held_out.jsonl")[:16]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=3, eos_token_id=None)
    said = [tokenizer.decode(ids) for ids in output[:, inputs["input_ids"].shape[1] :]]
    rows: list[dict[str, object]] = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, said, strict=True)]
    encoded = encode_rows(rows, tokenizer)
    encoded.answer_mask[encoded.input_ids == tokenizer.eos_token_id] = False
    assert greedy_accuracy(model, encoded) == 1.0


def test_preset_weights_are_the_same_for_the_same_seed(folder: Path, tmp_path: Path) -> None:
    build_arithmetic(tmp_path, seed=5, settings=SHORT)
    for name in ("model/model.safetensors", "train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_preset_command_does_nothing_when_the_folder_is_complete(folder: Path) -> None:
    before = (folder / "preset.json").stat().st_mtime_ns
    assert main(["arithmetic", "--out", str(folder), "--seed", "5"]) == 0
    assert (folder / "preset.json").stat().st_mtime_ns == before
