"""What requests are checked against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the served model.

    vocab_size: ids below it exist, and may stand in a prompt.
    sampled_vocab_size: ids below it are sampled; the rest pads the embedding.
    max_model_len: prompt plus response, in tokens.
    eos_ids: they end a response unless it ignores EOS.
    """

    folder: str
    vocab_size: int
    sampled_vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
