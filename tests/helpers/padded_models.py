"""Tiny models whose vocabulary is larger than their tokenizer, with padding that is likely to be sampled where nothing forbids it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from tests.helpers.tiny_models import EOS_ID, Architecture, save_tiny_model

NUM_KNOWN = 60
VOCAB_SIZE = 64
_LOUDNESS = 20.0
_HEADS = ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight")


def save_padded_model(folder: Path, architecture: Architecture, *, tied: bool, seed: int = 0) -> Path:
    """Write a model with 64 rows and a tokenizer of 60 tokens; one of the ids 60 to 63 is nearly always the likeliest. It pads with EOS."""
    save_tiny_model(folder, architecture, tied=tied, seed=seed, vocab_size=VOCAB_SIZE, pad_token_id=EOS_ID)
    make_padding_loud(folder, NUM_KNOWN)
    return folder


def make_padding_loud(folder: Path, num_known: int) -> None:
    """Give the folder a tokenizer of `num_known` tokens, and the rows behind them large outputs of either sign."""
    Tokenizer(models.WordLevel(vocab={f"w{index}": index for index in range(num_known)})).save(str(folder / "tokenizer.json"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors[next(name for name in _HEADS if name in tensors)]
    for token_id in range(num_known, head.shape[0]):
        # Opposite rows: whatever the state, the logit of one of them is large.
        head[token_id] = _LOUDNESS * head[num_known % 2] * (-1) ** token_id
    save_file(tensors, file, metadata={"format": "pt"})


def loud_share(logits: torch.Tensor, num_known: int) -> float:
    """Share of rows [N, V] whose likeliest id is padding."""
    return float((logits.argmax(dim=-1) >= num_known).float().mean())
