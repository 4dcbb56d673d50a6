"""Random models of the benchmark sizes, with a character tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

# hidden, layers, heads, key-value heads, intermediate
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "nano": (128, 4, 4, 2, 512),
    "micro": (384, 6, 6, 2, 1024),
    "mini": (768, 8, 12, 4, 2048),
}
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_VOCAB_SIZE = 128
_MAX_POSITIONS = 2048


def write_random_model(size: str, folder: Path, seed: int = 0) -> int:
    """Save a random Qwen2 model with tied embeddings and its tokenizer; returns the number of parameters.

    Raises: KeyError: size is not one of SIZES.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, heads, kv_heads, intermediate = SIZES[size]
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
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
