"""Preset `smollm2`: SmolLM2-135M-Instruct and simple sums from reasoning-gym, as chat messages."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import torch

from shoal.errors import DataError
from shoal_trainer.presets.files import save_folder, write_preset
from shoal_trainer.presets.problems import Row
from shoal_trainer.presets.wheel import PACKAGE, VERSION, find_gguf

_log = logging.getLogger("shoal_trainer.presets")

DATASET = "chain_sum"
NUM_DRAWN = 4000
"""Draws repeat at random; so many give nearly all of the 200 different questions."""
NUM_HELD_OUT = 48
INSTRUCTION = "Answer with the number only."
_PROBE, _PROBE_ANSWER = "What is the capital of France?", "Paris"


def build_smollm2(out: Path, seed: int) -> dict[str, object]:
    """Write the preset into `out` and return what preset.json holds; the seed decides the problems only.

    Raises:
        UnavailableError: the model cannot be fetched.
        DataError: the model does not answer a simple question, so the conversion went wrong.
    """
    started = time.perf_counter()
    gguf = find_gguf()
    _log.info("converting %s", gguf.name)
    model, tokenizer = load_model(gguf)
    answer = greedy_answer(model, tokenizer, _PROBE)
    if _PROBE_ANSWER not in answer:
        raise DataError(f"the converted model answers {_PROBE!r} with {answer!r}: check the versions of transformers and gguf")
    save_folder(model, tokenizer, out / "model")
    train, held_out = make_rows(seed)
    facts = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "source": f"{PACKAGE} {VERSION}",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return write_preset(out, name="smollm2", seed=seed, train=train, held_out=held_out, facts=facts)


def load_model(gguf: Path) -> tuple[Any, Any]:
    """Read the GGUF file; return a LlamaForCausalLM in float32 with tied embeddings, and the tokenizer.

    The weights are copied into a fresh model, whose configuration knows nothing of GGUF and saves as safetensors.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    values = {key: value for key, value in loaded.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model.eval(), AutoTokenizer.from_pretrained(**source)


@torch.no_grad()
def greedy_answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int = 24) -> str:  # noqa: ANN401 - transformers ships no usable types
    """Ask one question through the chat template and decode greedily."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Return train and held-out rows: all sums and differences of two digits, in an order that the seed decides.

    The untrained policy often knows the answer but wraps it in a sentence, for which reasoning-gym gives little; so there is
    something to learn within a few steps.
    """
    from reasoning_gym import create_dataset

    drawn = create_dataset(DATASET, size=NUM_DRAWN, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    entries = list({entry["question"]: entry for entry in drawn}.values())
    random.Random(f"shoal/smollm2/{seed}").shuffle(entries)
    rows = [_row(entry) for entry in entries]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def _row(entry: dict[str, Any]) -> Row:
    content = f"What is {entry['metadata']['expression']}? {INSTRUCTION}"
    return {"prompt": [{"role": "user", "content": content}], "answer": entry["answer"], "dataset": DATASET, "entry": entry}
