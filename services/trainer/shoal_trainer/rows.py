"""Rows of several micro-batches as one tensor and back; an advantage looks at the whole batch of a rank.

Legend: B rows of one micro-batch, T its response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal_trainer.batching import MicroBatch


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Stack [B_i, T_i] tensors into [sum B_i, max T_i], padded with 0 (False)."""
    if not parts:
        return torch.zeros(0, 1)
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def split_rows(joined: Tensor, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Undo `join_rows`: one [B_i, T_i] tensor per micro-batch."""
    shapes = [batch.response_mask.shape for batch in batches]
    rows = torch.split(joined, [shape[0] for shape in shapes])
    return [part[:, : shape[1]] for part, shape in zip(rows, shapes, strict=True)]
