"""How the sequences of a forward pass lie in the model's input.

Legend: B sequences, R rows, L positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    borders: [B + 1] int32, where each of the packed sequences starts, and the end; None unless they are packed.
    max_length: longest sequence.
    """

    input_ids: Tensor
    starts: Tensor
    position_ids: Tensor | None = None
    borders: Tensor | None = None
    max_length: int

    @property
    def num_positions(self) -> int:
        """Positions that go through the model."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> ModelInputs:
        """Move the tensors."""
        if device.type == "cpu":
            return self
        names = ("input_ids", "starts", "position_ids", "borders")
        moved = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(self, **moved)


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
