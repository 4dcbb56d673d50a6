"""Shapes of models by name, and from a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from shoal.errors import ConfigError
from shoal.weights.llama_layouts import LlamaShape

_LLAMA_3_VOCAB, _QWEN_VOCAB, _QWEN_SMALL_VOCAB = 128256, 152064, 151936


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, **flags: bool) -> LlamaShape:
    return LlamaShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tied=flags.get("tied", False),
        qkv_bias=flags.get("qkv_bias", False),
        qk_norm=flags.get("qk_norm", False),
    )


SHAPES = {
    "smollm2-135m": _shape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
    "llama-1b": _shape(16, 2048, 32, 8, 64, 8192, _LLAMA_3_VOCAB, tied=True),
    "llama-3b": _shape(28, 3072, 24, 8, 128, 8192, _LLAMA_3_VOCAB, tied=True),
    "llama-8b": _shape(32, 4096, 32, 8, 128, 14336, _LLAMA_3_VOCAB),
    "llama-70b": _shape(80, 8192, 64, 8, 128, 28672, _LLAMA_3_VOCAB),
    "llama-405b": _shape(126, 16384, 128, 8, 128, 53248, _LLAMA_3_VOCAB),
    "mistral-7b": _shape(32, 4096, 32, 8, 128, 14336, 32768),
    "qwen2.5-0.5b": _shape(24, 896, 14, 2, 64, 4864, _QWEN_SMALL_VOCAB, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _shape(28, 1536, 12, 2, 128, 8960, _QWEN_SMALL_VOCAB, tied=True, qkv_bias=True),
    "qwen2.5-7b": _shape(28, 3584, 28, 4, 128, 18944, _QWEN_VOCAB, qkv_bias=True),
    "qwen2.5-32b": _shape(64, 5120, 40, 8, 128, 27648, _QWEN_VOCAB, qkv_bias=True),
    "qwen2.5-72b": _shape(80, 8192, 64, 8, 128, 29568, _QWEN_VOCAB, qkv_bias=True),
    "qwen3-0.6b": _shape(28, 1024, 16, 8, 128, 3072, _QWEN_SMALL_VOCAB, tied=True, qk_norm=True),
    "qwen3-8b": _shape(36, 4096, 32, 8, 128, 12288, _QWEN_SMALL_VOCAB, qk_norm=True),
    "qwen3-32b": _shape(64, 5120, 64, 8, 128, 25600, _QWEN_SMALL_VOCAB, qk_norm=True),
}
"""Published models that users ask about."""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class _ModelConfig(BaseModel, frozen=True):
    """What a push's layout depends on; other keys of a config.json are ignored."""

    model_type: str
    num_hidden_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: dict[str, object] | None = None


def choose_shape(model: Path | None, name: str | None) -> LlamaShape:
    """The shape of a model's config, or a named one. Raises: ConfigError: neither or both, or as the two functions below."""
    if model is not None and name is None:
        return shape_of_model(model)
    if name is not None and model is None:
        return named_shape(name)
    raise ConfigError(f"give either --model or --shape; known shapes: {', '.join(SHAPES)}")


def named_shape(name: str) -> LlamaShape:
    """Raises: ConfigError: there is no shape of this name; lists them."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}, or give --model a folder with a config.json")
    return SHAPES[name]


def shape_of_model(path: Path) -> LlamaShape:
    """The shape in a config.json, or in the one of a folder.

    Raises: ConfigError: it cannot be read, or is of a family whose layout is not derived here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = _ModelConfig.model_validate(json.loads(file.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give a config.json or a folder that has one") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{file} does not describe a decoder: {faults}") from error
    return _shape_of_config(config, file)


def _shape_of_config(config: _ModelConfig, file: Path) -> LlamaShape:
    family = config.model_type
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(
            f"{file} is of family {family!r}; a plan without an engine is derived for {known} only "
            "(a push itself asks the engine, so it may well carry this model)"
        )
    if config.quantization_config is not None:
        raise ConfigError(f"{file} is quantised; how an engine lays out quantised weights is not derived here")
    return LlamaShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied=config.tie_word_embeddings,
        # Qwen2 has these three without saying so; attention_bias adds o as well.
        qkv_bias=family == "qwen2" or config.attention_bias,
        o_bias=family != "qwen2" and config.attention_bias,
        mlp_bias=family == "llama" and config.mlp_bias,
        qk_norm=family == "qwen3",
    )
