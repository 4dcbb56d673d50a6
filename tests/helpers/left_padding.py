"""A layout that the trainer does not use itself: padding on the left, as generation pads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from shoal_trainer.inputs import ModelInputs


def pad_rows_left(sequences: Sequence[NDArray[np.int32]]) -> ModelInputs:
    """One row per sequence, padded on the left with id 0 behind a mask.

    Args:
        sequences: ids of each; may be empty.
    """
    width = max([1, *(len(sequence) for sequence in sequences)])
    lengths = np.array([len(sequence) for sequence in sequences] or [1], np.int64)
    pads = width - lengths
    columns = np.arange(width)[None, :]
    ids = np.zeros((len(lengths), width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, pads[row] :] = sequence
    return ModelInputs(
        input_ids=torch.from_numpy(ids),
        starts=torch.from_numpy(np.arange(len(sequences)) * width + pads[: len(sequences)]),
        position_ids=torch.from_numpy(np.maximum(columns - pads[:, None], 0)),
        attention_mask=torch.from_numpy(columns >= pads[:, None]),
        max_length=width,
    )
