"""What requests are checked against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the served model. eos_ids end a response unless it ignores EOS; max_model_len is prompt plus response, in tokens."""

    folder: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
