"""What scripted weight loaders do to meta tensors, recorded as regions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shoal_rollout.load_recorder import LoadRecorder, RecordedLoad, check_coverage
from torch import Tensor

from shoal.errors import ConfigError
from shoal.types import Box, SinkRegion


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _record(checkpoint: dict[str, Tensor], parameters: dict[str, Tensor], load: Callable[[], None]) -> RecordedLoad:
    recorder = LoadRecorder(checkpoint, parameters)
    with recorder:
        load()
    return recorder.result()


def _region(parameter: str, source: str, at: tuple[int, ...], to: tuple[int, ...], sizes: tuple[int, ...]) -> SinkRegion:
    return SinkRegion(
        parameter=parameter, source_name=source, source_box=Box(offsets=at, sizes=sizes), parameter_box=Box(offsets=to, sizes=sizes)
    )


def test_recorder_sees_fused_rows_of_one_rank() -> None:
    q, k, fused = _meta(8, 6), _meta(4, 6), _meta(6, 6)

    def load() -> None:
        fused.data.narrow(0, 0, 4).copy_(q.narrow(0, 4, 4))
        fused.data.narrow(0, 4, 2).copy_(k.narrow(0, 2, 2))

    recorded = _record({"q": q, "k": k}, {"qk": fused}, load)
    assert recorded.regions == (_region("qk", "q", (4, 0), (0, 0), (4, 6)), _region("qk", "k", (2, 0), (4, 0), (2, 6)))
    check_coverage(recorded, {"qk": (6, 6)})


def test_recorder_sees_columns_through_a_cast_and_a_clone() -> None:
    weight, parameter = _meta(4, 8), _meta(4, 4, dtype=torch.bfloat16)

    def load() -> None:
        parameter.copy_(weight[:, 2:].to(torch.bfloat16).clone()[:, 2:])

    assert _record({"w": weight}, {"p": parameter}, load).regions == (_region("p", "w", (0, 4), (0, 0), (4, 4)),)


def test_recorder_takes_zeros_as_padding() -> None:
    table, parameter = _meta(5, 3), _meta(8, 3)

    def load() -> None:
        parameter[:5].data.copy_(table)
        parameter[5:].data.fill_(0)

    recorded = _record({"t": table}, {"p": parameter}, load)
    assert recorded.zeros == {"p": (Box(offsets=(5, 0), sizes=(3, 3)),)}
    check_coverage(recorded, {"p": (8, 3)})


def test_coverage_refuses_what_is_written_never_or_twice() -> None:
    whole = _region("p", "w", (0, 0), (0, 0), (4, 3))
    with pytest.raises(ConfigError, match=r"parameter p .*3 of 15 elements"):
        check_coverage(RecordedLoad(regions=(whole,), zeros={}), {"p": (5, 3)})
    with pytest.raises(ConfigError, match=r"parameter p .*overlap"):
        check_coverage(RecordedLoad(regions=(whole, whole), zeros={}), {"p": (8, 3)})
    with pytest.raises(ConfigError, match="parameter q "):
        check_coverage(RecordedLoad(regions=(whole,), zeros={}), {"p": (4, 3), "q": (1,)})


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("transposed", lambda w, p: p.copy_(w.t())),
        ("computed", lambda w, p: p.copy_(w + 1)),
        ("broadcast", lambda w, p: p.copy_(w[:1])),
        ("changed in place", lambda w, p: p.copy_(w).add_(1)),
        ("filled with ones", lambda w, p: p.fill_(1)),
        ("flattened", lambda w, p: p.view(-1).copy_(w.reshape(-1))),
        ("stepped", lambda w, p: p[::2].copy_(w[::2])),
    ],
)
def test_recorder_refuses_anything_but_rectangles(name: str, load: Callable[[Tensor, Tensor], object]) -> None:
    weight, parameter = _meta(4, 4), _meta(4, 4)
    with pytest.raises(ConfigError, match=r"engine parameter layer\.p is .*cannot be updated in place yet"):
        _record({"w": weight}, {"layer.p": parameter}, lambda: _drop(load(weight, parameter)))


def test_recorder_refuses_a_weight_that_goes_into_a_buffer() -> None:
    weight, buffer = _meta(4), torch.zeros(4)
    with pytest.raises(ConfigError, match=r"checkpoint tensor w is loaded into a .* buffer"):
        _record({"w": weight}, {"p": _meta(4)}, lambda: _drop(buffer.copy_(weight)))


def _drop(value: object) -> None:
    """Forget a result."""
