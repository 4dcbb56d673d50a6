"""Views of row-major tensors as boxes, compared with what the views really show."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_rollout.strided_boxes import box_of_view
from torch import Tensor


def _box(base: Tensor, view: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    box = box_of_view(tuple(base.shape), int(view.storage_offset()), tuple(view.shape), view.stride())
    return None if box is None else (box.offsets, box.sizes)


@st.composite
def _narrowed(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = base
    for dim, extent in enumerate(shape):
        start = draw(st.integers(0, extent - 1))
        view = view.narrow(dim, start, draw(st.integers(1, extent - start)))
    return base, view


@settings(max_examples=100, deadline=None)
@given(_narrowed())
def test_box_of_view_finds_what_was_narrowed(case: tuple[Tensor, Tensor]) -> None:
    base, view = case
    found = _box(base, view)
    assert found is not None
    again = base
    for dim, (offset, size) in enumerate(zip(*found, strict=True)):
        again = again.narrow(dim, offset, size)
    assert torch.equal(again, view)


def test_box_of_view_accepts_dropped_and_added_dims_of_size_one() -> None:
    base = torch.empty(4, 6)
    assert _box(base, base[2]) == ((2, 0), (1, 6))
    assert _box(base, base[1:3, 4].unsqueeze(0)) == ((1, 4), (2, 1))
    assert _box(torch.empty(()), torch.empty(())) == ((), ())


def test_box_of_view_accepts_an_empty_view() -> None:
    base = torch.empty(4, 6)
    found = _box(base, base[4:])
    assert found is not None
    assert 0 in found[1]


def test_box_of_view_refuses_what_is_no_box() -> None:
    base = torch.empty(4, 6)
    for view in (base.t(), base.view(-1), base[::2], base[:, ::2], base[:1].expand(3, 6), base.view(2, 12), base.view(8, 3)):
        assert _box(base, view) is None, f"{tuple(view.shape)} with strides {view.stride()}"
