"""Random models of the benchmark sizes, with a character tokenizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_VOCAB_SIZE = 128
_MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Shape of a Qwen2 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = _VOCAB_SIZE


SIZES = {
    "nano": ModelSize(128, 4, 4, 2, 512),
    "micro": ModelSize(384, 6, 6, 2, 1024),
    "mini": ModelSize(768, 8, 12, 4, 2048),
}
PARAMETER_SIZES = {
    "1M": ModelSize(128, 4, 4, 2, 512),
    "5M": ModelSize(256, 6, 4, 2, 1024, 512),
    "50M": ModelSize(768, 8, 12, 4, 2048, 512),
    "135M": ModelSize(576, 30, 9, 3, 1536, 49152),
    "300M": ModelSize(1280, 17, 20, 4, 3456, 512),
    "500M": ModelSize(896, 24, 14, 2, 4864, 151936),
    "1.5B": ModelSize(1536, 28, 12, 2, 8960, 151936),
}
"""By the number of parameters, as a weight push sees a model."""


def write_random_model(size: str, folder: Path, seed: int = 0) -> int:
    """Save a random model of SIZES and its tokenizer; returns the number of parameters. Raises: KeyError: no such size."""
    return write_model(SIZES[size], folder, seed)


def write_model(size: ModelSize, folder: Path, seed: int = 0) -> int:
    """Save a random model of any size and a character tokenizer; returns the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=_MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return sum(int(parameter.numel()) for parameter in model.parameters())


def write_sums(path: Path, num_rows: int, seed: int = 0) -> None:
    """Rows {"prompt": "12+34=", "answer": "46"}, seeded."""
    rng = random.Random(seed)
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(num_rows)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


def _tokenizer() -> Any:  # noqa: ANN401 - transformers is untyped
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = _SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)
