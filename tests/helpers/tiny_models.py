"""Tiny random Hugging Face models for tests: real architectures, a few thousand parameters, no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

Architecture = Literal["qwen2", "llama"]

VOCAB_SIZE = 101
"""Odd, so that an engine has to pad its vocabulary."""
EOS_ID = 2
MAX_POSITIONS = 256


def tiny_config(architecture: Architecture, *, tied: bool, hidden_size: int = 128, num_layers: int = 2) -> Qwen2Config | LlamaConfig:
    """Describe a tiny model with 4 query heads and 2 key-value heads of 32 (the smallest head that the CPU engine supports)."""
    cls = Qwen2Config if architecture == "qwen2" else LlamaConfig
    return cls(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )


def save_tiny_model(folder: Path, architecture: Architecture = "qwen2", *, tied: bool = False, seed: int = 0) -> Path:
    """Write a random float32 model as a Hugging Face folder with safetensors and return the folder.

    Weights are drawn wide (standard deviation 0.3) and biases are not zero, so that a wrong slice shows in the log-probabilities.
    """
    model = random_model(architecture, tied=tied, seed=seed)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def random_model(architecture: Architecture, *, tied: bool, seed: int) -> PreTrainedModel:
    """Build a random float32 model on the CPU."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, tied=tied), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.eval()
    return model


def model_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Load every checkpoint tensor of a folder under its Hugging Face name."""
    return {name: tensor.float().numpy() for path in _shards(folder) for name, tensor in load_file(path).items()}


def perturbed_tensors(folder: Path, *, seed: int, scale: float = 0.1) -> dict[str, NDArray[np.float32]]:
    """Return the folder's tensors with noise added: the weights of a next policy version."""
    rng = np.random.default_rng(seed)
    return {
        name: tensor + scale * rng.standard_normal(tensor.shape, dtype=np.float32) for name, tensor in sorted(model_tensors(folder).items())
    }


def save_variant(folder: Path, target: Path, tensors: dict[str, NDArray[np.float32]]) -> Path:
    """Write `tensors` as a model folder with the configuration of `folder`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    save_file({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def reference_logprobs(folder: Path, prompt_ids: list[int], response_ids: list[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
    """Log-probability of each response token by a Hugging Face float32 forward; [T]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    picked = logprobs.gather(1, torch.tensor(response_ids)[:, None])[:, 0]
    return picked.numpy()


def _shards(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.safetensors"))
