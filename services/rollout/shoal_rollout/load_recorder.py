"""Records what a model's own `load_weights` does to each checkpoint tensor, on meta tensors that hold no data.

Every weight loader ends in `copy_` from a view of a checkpoint tensor into a view of a parameter. Both views tell their storage, offset
and strides, hence which box of which checkpoint tensor lands in which box of which parameter, for any architecture. The same idea is
in vLLM's sharded_rdt and nccl_m2n weight transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ConfigError
from shoal.types import Box, SinkRegion
from shoal.weights import boxes
from shoal_rollout.strided_boxes import box_of_view

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar: 1, _aten.fill_.Tensor: 1, _aten.zero_.default: None}
_PLAIN_COPIES = {_aten._to_copy.default, _aten.clone.default}


@dataclass(frozen=True, slots=True)
class _Origin:
    """A storage that holds a box of a checkpoint tensor: `offsets` is where the storage's first element comes from."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """What loading wrote: regions copied from the checkpoint, and boxes set to zero (padding), by parameter."""

    regions: tuple[SinkRegion, ...]
    zeros: Mapping[str, tuple[Box, ...]]


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A dispatch mode: use it around `model.load_weights(recorder.checkpoint.items())`.

    Args:
        checkpoint: Meta tensors by Hugging Face name.
        parameters: Meta tensors by engine parameter name; several names may share one tensor, the first one counts.
    """

    def __init__(self, checkpoint: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.checkpoint = dict(checkpoint)
        # The tensors are kept, so that no storage address is used twice while this object lives.
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in parameters.items():
            self._parameters.setdefault(_storage_of(tensor), (name, tensor))
        self._origins = {
            _storage_of(tensor): _Origin(name, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in self.checkpoint.items()
        }
        self._kept: list[Tensor] = []
        self._regions: list[SinkRegion] = []
        self._zeros: dict[str, list[Box]] = {}

    def result(self) -> RecordedLoad:
        """Everything recorded so far."""
        return RecordedLoad(regions=tuple(self._regions), zeros={name: tuple(found) for name, found in self._zeros.items()})

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - the signature that torch calls
        """Record writes into parameters; let everything else run."""
        if func is _aten.copy_.default:
            return self._on_copy(args[0], args[1])
        if func in _FILLS and _storage_of(args[0]) in self._parameters:
            return self._on_fill(args[0], 0 if _FILLS[func] is None else args[1])
        answer = func(*args, **(kwargs or {}))
        if func in _PLAIN_COPIES:
            self._follow(args[0], answer)
        elif isinstance(answer, Tensor) and _storage_of(answer) in self._parameters and func._schema.is_mutable:  # type: ignore[attr-defined]
            self._refuse(answer, f"changed by {func}")
        return answer

    def _on_copy(self, target: Tensor, source: Tensor) -> Tensor:
        owner = self._parameters.get(_storage_of(target))
        if owner is None:
            self._check_no_weight_is_lost(target, source)
            return target
        name, parameter = owner
        if target.numel() == 0:
            return target
        origin = self._origins.get(_storage_of(source))
        if origin is None:
            self._refuse(target, "written with values that are computed, not a part of one checkpoint tensor")
        parameter_box = _box_of(parameter, target)
        part = _box_in(origin.shape, source)
        if parameter_box is None or part is None or tuple(target.shape) != tuple(source.shape) or parameter_box.sizes != part.sizes:
            self._refuse(target, f"written from {origin.name} in a way that is not a copy of a rectangle of the same shape")
        offsets = tuple(map(sum, zip(part.offsets, origin.offsets, strict=True)))
        source_box = Box(offsets=offsets, sizes=part.sizes)
        self._regions.append(SinkRegion(parameter=name, source_name=origin.name, source_box=source_box, parameter_box=parameter_box))
        return target

    def _on_fill(self, target: Tensor, value: object) -> Tensor:
        name, parameter = self._parameters[_storage_of(target)]
        if target.numel() == 0:
            return target
        box = _box_of(parameter, target)
        if box is None or not isinstance(value, int | float) or value != 0:
            self._refuse(target, f"filled with {value!r}, or in part; only rectangles of zeros are known as padding")
        self._zeros.setdefault(name, []).append(box)
        return target

    def _follow(self, source: Tensor, copied: Tensor) -> None:
        """A cast or a clone of a box of a checkpoint tensor still is that box."""
        origin = self._origins.get(_storage_of(source))
        if origin is None or not copied.is_contiguous():
            return
        part = _box_in(origin.shape, source)
        if part is not None and part.sizes == tuple(copied.shape):
            offsets = tuple(map(sum, zip(part.offsets, origin.offsets, strict=True)))
            self._origins[_storage_of(copied)] = _Origin(origin.name, part.sizes, offsets)
            self._kept.append(copied)

    def _check_no_weight_is_lost(self, target: Tensor, source: Tensor) -> None:
        origin = self._origins.get(_storage_of(source))
        if origin is not None:
            msg = (
                f"checkpoint tensor {origin.name} is loaded into a {list(target.shape)} buffer that is not a parameter; "
                "this model cannot be updated in place yet"
            )
            raise ConfigError(msg)

    def _refuse(self, target: Tensor, how: str) -> NoReturn:
        name = self._parameters[_storage_of(target)][0]
        msg = f"engine parameter {name} is {how}; this model cannot be updated in place yet"
        raise ConfigError(msg)


def check_coverage(load: RecordedLoad, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that regions and zeros cover every element of every parameter exactly once.

    Args:
        shapes: Shape by parameter name, one name per tensor.
    Raises: ConfigError: an element is written never or twice; names the parameter.
    """
    parts: dict[str, list[Box]] = {name: list(load.zeros.get(name, ())) for name in shapes}
    for region in load.regions:
        parts[region.parameter].append(region.parameter_box)
    for name, shape in shapes.items():
        fault = boxes.cover_fault(boxes.whole(shape), parts[name])
        if fault is not None:
            msg = f"engine parameter {name} is not loaded from the checkpoint exactly once: {fault}; it cannot be updated in place yet"
            raise ConfigError(msg)


def _box_of(parameter: Tensor, view: Tensor) -> Box | None:
    return _box_in(tuple(parameter.shape), view)


def _box_in(shape: tuple[int, ...], view: Tensor) -> Box | None:
    return box_of_view(shape, int(view.storage_offset()), tuple(view.shape), view.stride())


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
