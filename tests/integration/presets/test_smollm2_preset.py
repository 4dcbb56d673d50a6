"""The smollm2 preset: a real model, converted, and chat prompts that its scorer understands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_reward.builtin import reasoning_gym
from shoal_trainer.presets.__main__ import main
from shoal_trainer.presets.smollm2 import NUM_HELD_OUT, greedy_answer, make_rows


def test_smollm2_rows_are_disjoint_seeded_and_scorable() -> None:
    train, held_out = make_rows(0)
    prompts = [json.dumps(row["prompt"]) for row in (*train, *held_out)]
    assert len(set(prompts)) == len(prompts)
    assert len(held_out) == NUM_HELD_OUT
    assert len(train) > 140
    assert make_rows(0)[0] == train
    assert make_rows(1)[0] != train
    row = json.loads(json.dumps(held_out[0]))
    assert reasoning_gym("", row["answer"], row) == 1.0
    assert reasoning_gym("", "no idea", row) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_folder_loads_and_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["smollm2", "--out", str(tmp_path), "--seed", "0"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.vocab_size, len(tokenizer)) == (49_152, 49_152)
    assert not hasattr(model.config, "quantization_config")
    assert "Paris" in greedy_answer(model, tokenizer, "What is the capital of France?")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
