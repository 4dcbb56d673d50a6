"""What scripted weight loaders do to meta tensors, recorded as copies of boxes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shoal_rollout.load_recorder import LoadRecorder, RecordedCopy, RecordedLoad
from torch import Tensor

from shoal.errors import ConfigError
from shoal.types import Box


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _record(checkpoint: dict[str, Tensor], parameters: dict[str, Tensor], load: Callable[[], None]) -> RecordedLoad:
    recorder = LoadRecorder(checkpoint, parameters)
    with recorder:
        load()
    return recorder.result()


def _copy(parameter: str, source: str, at: tuple[int, ...], to: tuple[int, ...], sizes: tuple[int, ...]) -> RecordedCopy:
    return RecordedCopy(parameter, source, Box(offsets=at, sizes=sizes), Box(offsets=to, sizes=sizes))


def test_recorder_sees_fused_rows_of_one_rank() -> None:
    q, k, fused = _meta(8, 6), _meta(4, 6), _meta(6, 6)

    def load() -> None:
        fused.data.narrow(0, 0, 4).copy_(q.narrow(0, 4, 4))
        fused.data.narrow(0, 4, 2).copy_(k.narrow(0, 2, 2))

    recorded = _record({"q": q, "k": k}, {"qk": fused}, load)
    assert recorded.copies == (_copy("qk", "q", (4, 0), (0, 0), (4, 6)), _copy("qk", "k", (2, 0), (4, 0), (2, 6)))


def test_recorder_sees_columns_through_a_cast_and_a_clone() -> None:
    weight, parameter = _meta(4, 8), _meta(4, 4, dtype=torch.bfloat16)

    def load() -> None:
        parameter.copy_(weight[:, 2:].to(torch.bfloat16).clone()[:, 2:])

    assert _record({"w": weight}, {"p": parameter}, load).copies == (_copy("p", "w", (0, 4), (0, 0), (4, 4)),)


def test_recorder_sees_one_matrix_of_a_stack_on_either_side() -> None:
    stack, matrix, target, experts = _meta(3, 4, 6), _meta(4, 6), _meta(2, 6), _meta(5, 8, 6)

    def load() -> None:
        target.copy_(stack[2].to(torch.float64)[1:3])
        experts.data[4].narrow(0, 4, 4).copy_(matrix)

    first, second = _record({"s": stack, "m": matrix}, {"t": target, "e": experts}, load).copies
    assert first == RecordedCopy("t", "s", Box(offsets=(2, 1, 0), sizes=(1, 2, 6)), Box(offsets=(0, 0), sizes=(2, 6)))
    assert second == RecordedCopy("e", "m", Box(offsets=(0, 0), sizes=(4, 6)), Box(offsets=(4, 4, 0), sizes=(1, 4, 6)))


def test_recorder_takes_zeros_as_padding() -> None:
    table, parameter = _meta(5, 3), _meta(8, 3)

    def load() -> None:
        parameter[:5].data.copy_(table)
        parameter[5:].data.fill_(0)

    assert _record({"t": table}, {"p": parameter}, load).zeros == {"p": (Box(offsets=(5, 0), sizes=(3, 3)),)}


def test_recorder_tells_which_tensors_the_loader_skipped() -> None:
    used, skipped, parameter = _meta(4), _meta(4), _meta(4)
    recorder = LoadRecorder({"used": used, "skipped": skipped}, {}, watch_only=True)
    with recorder:
        parameter.copy_(used * 2)
        assert skipped.shape == (4,)
    assert recorder.touched == {"used"}


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda w, p: p.copy_(w.t()), "not a copy of a rectangle"),
        (lambda w, p: p.copy_(w + 1), "computes with checkpoint tensor w"),
        (lambda w, p: p.copy_(torch.ones_like(p)), r"parameter layer\.p is (changed|written with values)"),
        (lambda w, p: p.copy_(w[:1]), "not a copy of a rectangle"),
        (lambda w, p: p.copy_(w).add_(1), r"parameter layer\.p is changed or read"),
        (lambda w, p: p.copy_(torch.exp(p)), r"parameter layer\.p is changed or read"),
        (lambda w, p: p.fill_(1), r"parameter layer\.p is filled with 1"),
        (lambda w, p: p.view(-1).copy_(w.reshape(-1)), "not a copy of a rectangle"),
        (lambda w, p: p[::2].copy_(w[::2]), "not a copy of a rectangle"),
        (lambda w, p: p.copy_(w.t().contiguous()), "transposes, flattens or repeats checkpoint tensor w"),
        (lambda w, p: p.copy_(torch.cat([w[:2], w[2:]])), "computes with checkpoint tensor w"),
        (lambda w, p: w.mul_(2), "computes with checkpoint tensor w"),
        (lambda w, p: w.float().sum(), "computes with checkpoint tensor w"),
        (lambda w, p: (p.copy_(w), w.to(torch.bfloat16)), "copy of checkpoint tensor w that goes into no parameter"),
        (lambda w, p: torch.zeros(4, 4).copy_(p), r"parameter layer\.p is copied while loading"),
        (lambda w, p: torch.zeros(4, 4).copy_(w), "checkpoint tensor w is loaded into a .* buffer"),
    ],
)
def test_recorder_refuses_anything_but_copies_of_rectangles(load: Callable[[Tensor, Tensor], object], why: str) -> None:
    weight, parameter = _meta(4, 4), _meta(4, 4)
    with pytest.raises(ConfigError, match=why):
        _record({"w": weight}, {"layer.p": parameter}, lambda: _drop(load(weight, parameter)))


def _drop(value: object) -> None:
    """Forget a result."""
