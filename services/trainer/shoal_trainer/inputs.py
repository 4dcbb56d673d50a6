"""How the sequences of a forward pass lie in the model's input.

Legend: B sequences, R rows, L positions of a row.

Training pads on the right, or packs where the model can (`shoal_trainer.packing`). What a model makes of a sequence is the same in every
layout: a position counts from its own sequence's start and sees nothing of padding or of other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The input of one forward pass.

    input_ids: [R, L] int64; one dummy position for no sequences.
    starts: [B] int64, position of each sequence's first token in the flattened [R * L].
    position_ids: [R, L] int64 within each sequence; None if every row is one sequence padded on the right.
    attention_mask: [R, L] bool, False is padding; None where no real position could see any.
    borders: [B + 1] int32, where each of the packed sequences starts, and the end; None unless they are packed.
    max_length: longest sequence.
    """

    input_ids: Tensor
    starts: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    borders: Tensor | None = None
    max_length: int

    @property
    def num_positions(self) -> int:
        """Positions that go through the model."""
        return self.input_ids.numel()

    def arguments(self) -> dict[str, Any]:
        """What a Hugging Face model is called with; the names of the borders are those that it passes on to its attention."""
        packed = {} if self.borders is None else {"cu_seq_lens_q": self.borders, "cu_seq_lens_k": self.borders}
        lengths = {} if self.borders is None else {"max_length_q": self.max_length, "max_length_k": self.max_length}
        optional = {name: getattr(self, name) for name in ("position_ids", "attention_mask") if getattr(self, name) is not None}
        return {"input_ids": self.input_ids, "use_cache": False, **optional, **packed, **lengths}

    def to(self, device: torch.device) -> ModelInputs:
        """Move the tensors."""
        if device.type == "cpu":
            return self
        names = ("input_ids", "starts", "position_ids", "attention_mask", "borders")
        moved = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(self, **moved)


Layout: TypeAlias = Callable[[Sequence[NDArray[np.int32]]], ModelInputs]
"""Lays sequences (ids of each, none of them empty) out for a forward pass."""


def pad_rows(sequences: Sequence[NDArray[np.int32]]) -> ModelInputs:
    """One row per sequence, padded on the right with id 0: causal attention keeps padding away from real positions.

    Args:
        sequences: ids of each; may be empty.
    """
    width = max([1, *(len(sequence) for sequence in sequences)])
    ids = np.zeros((max(len(sequences), 1), width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ModelInputs(input_ids=torch.from_numpy(ids), starts=torch.arange(len(sequences)) * width, max_length=width)


def pack_rows(sequences: Sequence[NDArray[np.int32]]) -> ModelInputs:
    """All sequences behind one another in one row, without padding.

    Args:
        sequences: ids of each; may be empty.
    """
    parts = list(sequences) or [np.zeros(1, np.int32)]
    lengths = np.array([len(part) for part in parts], np.int64)
    ends = np.cumsum(lengths)
    position_ids = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return ModelInputs(
        input_ids=torch.from_numpy(np.concatenate(parts).astype(np.int64))[None],
        starts=torch.from_numpy((ends - lengths)[: len(sequences)]),
        position_ids=torch.from_numpy(position_ids)[None],
        borders=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_length=int(lengths.max()),
    )
