"""Preset `arithmetic`: a one-million-parameter Qwen2-style policy that half knows two-operand sums."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from shoal_trainer.presets.files import save_folder, write_preset
from shoal_trainer.presets.problems import Problems, make_problems
from shoal_trainer.presets.tokenizer import build_char_tokenizer
from shoal_trainer.presets.warmup import WarmUpResult, WarmUpSettings, encode_rows, greedy_accuracy, warm_up

_log = logging.getLogger("shoal_trainer.presets")


def build_arithmetic(out: Path, seed: int, settings: WarmUpSettings | None = None) -> dict[str, object]:
    """Write the preset into `out` and return what preset.json holds.

    Args:
        out: folder; created if missing.
        seed: decides the split of the problems, the initial weights and the warm-up batches.
        settings: warm-up; None takes the preset's own.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    problems, tokenizer = make_problems(seed), build_char_tokenizer()
    model = build_model(tokenizer)
    result = warm_up(
        model,
        encode_rows(problems.warm_up, tokenizer),
        encode_rows(problems.validation, tokenizer),
        WarmUpSettings() if settings is None else settings,
        seed,
    )
    held_out_accuracy = greedy_accuracy(model, encode_rows(problems.held_out, tokenizer))
    _log.info("held-out accuracy %.3f", held_out_accuracy)
    save_folder(model, tokenizer, out / "model")
    facts = _facts(model, problems, result) | {
        "held_out_accuracy": round(held_out_accuracy, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return write_preset(out, name="arithmetic", seed=seed, train=problems.train, held_out=problems.held_out, facts=facts)


def build_model(tokenizer: Any) -> Any:  # noqa: ANN401 - transformers ships no usable types
    """Make the untrained policy in float32; weights come from torch's global seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _facts(model: torch.nn.Module, problems: Problems, result: WarmUpResult) -> dict[str, object]:
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_warm_up_prompts": len(problems.warm_up),
        "warm_up_steps": result.steps,
        "warm_up_loss": round(result.loss, 4),
        "validation_accuracy": round(result.validation_accuracy, 4),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
