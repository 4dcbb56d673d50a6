"""Tiny random Hugging Face models for tests: real architectures, a few thousand parameters, no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shoal.vocabulary import sampled_vocab_size

Architecture = Literal["qwen2", "llama", "qwen3", "gemma", "gemma2", "gemma3", "opt", "mixtral", "qwen3_moe", "phi3", "gpt2"]

VOCAB_SIZE = 101
"""Odd, so that an engine has to pad its vocabulary."""
EOS_ID = 2
MAX_POSITIONS = 256
_NORM_WEIGHTS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")


_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "phi3": Phi3Config,
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    # The kernel for experts wants a multiple of 32, so these are padded after loading.
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny_config(
    architecture: Architecture, *, tied: bool, hidden_size: int = 128, num_layers: int = 2, **overrides: object
) -> PreTrainedConfig:
    """Describe a tiny model with 4 query heads and 2 key-value heads of 32 (the smallest head that the CPU engine supports)."""
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": 0}
    special = {**ids, "tie_word_embeddings": tied, **overrides}
    if architecture == "gpt2":
        return GPT2Config(n_embd=hidden_size, n_layer=num_layers, n_head=4, n_positions=MAX_POSITIONS, **special)
    shared = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    if architecture == "opt":
        sizes = {"ffn_dim": 2 * hidden_size, "max_position_embeddings": MAX_POSITIONS, "word_embed_proj_dim": hidden_size}
        return OPTConfig(**shared, **sizes, **special)
    sizes = {"intermediate_size": 2 * hidden_size, "max_position_embeddings": MAX_POSITIONS}
    return _CONFIGS[architecture](**shared, **sizes, **{"num_key_value_heads": 2, **_EXTRAS.get(architecture, {}), **special})


def save_tiny_model(
    folder: Path,
    architecture: Architecture = "qwen2",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **overrides: object,
) -> Path:
    """Write a random model as a Hugging Face folder with safetensors and return the folder.

    Weights are drawn wide (standard deviation 0.3) and biases are not zero, so that a wrong slice shows in the log-probabilities.
    """
    model = random_model(architecture, tied=tied, seed=seed, **overrides).to(dtype)
    model.save_pretrained(folder, safe_serialization=True, max_shard_size=max_shard_size)
    return folder


def random_model(architecture: Architecture, *, tied: bool, seed: int, **overrides: object) -> PreTrainedModel:
    """Build a random float32 model on the CPU."""
    config = tiny_config(architecture, tied=tied, **overrides)  # type: ignore[arg-type]  # hidden_size and num_layers are integers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith(_NORM_WEIGHTS) else 0.0
            # Gemma scales embeddings up; wide ones would drown what its layers add.
            deviation = 0.05 if architecture.startswith("gemma") and "embed_tokens" in name else 0.3
            parameter.copy_(mean + deviation * torch.randn(parameter.shape, generator=generator))
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
    """Log-probability of each response token by a Hugging Face float32 forward, among the ids that the folder's tokenizer knows; [T]."""
    logprobs = torch.log_softmax(_reference_logits(folder, prompt_ids, response_ids) / temperature, dim=-1)
    picked = logprobs.gather(1, torch.tensor(response_ids)[:, None])[:, 0]
    return picked.numpy()


def reference_choices(folder: Path, prompt_ids: list[int], response_ids: list[int]) -> list[int]:
    """The likeliest token that is known at each place of the response by a Hugging Face float32 forward; [T]."""
    choices: list[int] = _reference_logits(folder, prompt_ids, response_ids).argmax(-1).tolist()
    return choices


def _reference_logits(folder: Path, prompt_ids: list[int], response_ids: list[int]) -> torch.Tensor:
    # The other attention leaves out the capped logits of Gemma 2.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits[:, : sampled_vocab_size(str(folder), logits.shape[1])]


def _shards(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*.safetensors"))
