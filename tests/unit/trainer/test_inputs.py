"""How sequences lie in the model's input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from shoal_trainer.inputs import Layout, pack_rows, pad_rows

from tests.helpers.left_padding import pad_rows_left

LAYOUTS = (pad_rows, pad_rows_left, pack_rows)


def sequences(*lengths: int) -> list[NDArray[np.int32]]:
    """Ids 1, 2, 3, … of all sequences together."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length + 1, end + 1, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_each_sequence_from_its_start(layout: Layout) -> None:
    rows = sequences(2, 5, 1)
    inputs = layout(rows)
    flat = inputs.input_ids.flatten()
    for row, start in zip(rows, inputs.starts.tolist(), strict=True):
        assert flat[start : start + len(row)].tolist() == row.tolist()
        if inputs.position_ids is not None:
            assert inputs.position_ids.flatten()[start : start + len(row)].tolist() == list(range(len(row)))
    assert inputs.max_length == 5
    assert inputs.num_positions == (8 if layout is pack_rows else 15)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_nothing_is_one_dummy_position(layout: Layout) -> None:
    inputs = layout([])
    assert inputs.input_ids.tolist() == [[0]]
    assert inputs.starts.tolist() == []
    assert inputs.max_length == 1


def test_pack_rows_gives_borders_and_positions_that_restart() -> None:
    inputs = pack_rows(sequences(3, 1, 2))
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert inputs.position_ids is not None
    assert inputs.borders is not None
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert inputs.borders.tolist() == [0, 3, 4, 6]
    assert inputs.borders.dtype == torch.int32
    assert inputs.arguments().keys() == {
        "input_ids", "use_cache", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    }  # fmt: skip
    nothing = pack_rows([])
    assert nothing.borders is not None
    assert nothing.borders.tolist() == [0, 1]


def test_pad_rows_left_masks_its_padding() -> None:
    inputs = pad_rows_left(sequences(1, 3))
    assert inputs.input_ids.tolist() == [[0, 0, 1], [2, 3, 4]]
    assert inputs.starts.tolist() == [2, 3]
    assert inputs.attention_mask is not None
    assert inputs.position_ids is not None
    assert inputs.attention_mask.tolist() == [[False, False, True], [True, True, True]]
    assert inputs.position_ids.tolist() == [[0, 0, 0], [0, 1, 2]]


def test_pad_rows_needs_neither_mask_nor_positions() -> None:
    assert pad_rows(sequences(1, 3)).arguments().keys() == {"input_ids", "use_cache"}
