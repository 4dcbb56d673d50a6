"""Records what a model's own `load_weights` does to each checkpoint tensor, on meta tensors that hold no data.

Every weight loader ends in `copy_` from a view of a checkpoint tensor into a view of a parameter. Both views tell their storage, offset
and strides, hence which box of which checkpoint tensor lands in which box of which parameter, for any architecture. The same idea is
in vLLM's sharded_rdt and nccl_m2n weight transfer. Anything else that a loader does with a weight (arithmetic, a transposed copy, a cast
that is kept elsewhere) is refused, so that what is recorded is all that loading does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ConfigError
from shoal.types import Box
from shoal.weights.boxes import whole
from shoal_rollout.strided_boxes import box_of_view

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar: 1, _aten.fill_.Tensor: 1, _aten.zero_.default: None}
_PLAIN_COPIES = {_aten._to_copy.default, _aten.clone.default}
_SHAPE_ONLY = {_aten.empty_like.default, _aten.new_empty.default, _aten.zeros_like.default, _aten.new_zeros.default}
"""Operators that look at a tensor's shape and type, not at its values."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row-major tensor of this shape comes from: a box of a named tensor. They may differ in dims of size 1."""

    name: str
    shape: tuple[int, ...]
    box: Box

    def box_of(self, part: Box) -> Box:
        """The named tensor's box behind a part of this tensor."""
        wide = iter([at for at, extent in zip(zip(part.offsets, part.sizes, strict=True), self.shape, strict=True) if extent != 1])
        offsets, sizes = list(self.box.offsets), list(self.box.sizes)
        for dim, size in enumerate(self.box.sizes):
            if size != 1:
                offset, sizes[dim] = next(wide)
                offsets[dim] += offset
        return Box(offsets=tuple(offsets), sizes=tuple(sizes))


@dataclass(frozen=True, slots=True)
class RecordedCopy:
    """One write: a box of a checkpoint tensor into a box of a parameter, elements in row-major order.

    The boxes may differ in dims of size 1: one expert's matrix goes into a slice of a stack of matrices.
    """

    parameter: str
    source_name: str
    source_box: Box
    parameter_box: Box


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """What loading wrote: boxes copied from the checkpoint, in order, and boxes set to zero (padding), by parameter."""

    copies: tuple[RecordedCopy, ...]
    zeros: Mapping[str, tuple[Box, ...]]


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A dispatch mode: use it around `model.load_weights(recorder.checkpoint.items())`.

    Args:
        checkpoint: Meta tensors by Hugging Face name.
        parameters: Meta tensors by engine parameter name, each with a storage of its own.
        watch_only: Only find which checkpoint tensors are touched; refuse nothing.
    """

    def __init__(self, checkpoint: Mapping[str, Tensor], parameters: Mapping[str, Tensor], *, watch_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._watch_only = watch_only
        self.checkpoint = dict(checkpoint)
        # The tensors are kept, so that no storage address is used twice while this object lives.
        self._parameters = {_storage_of(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._origins = {
            _storage_of(tensor): Origin(name, tuple(tensor.shape), whole(tensor.shape)) for name, tensor in self.checkpoint.items()
        }
        self._kept: list[Tensor] = []
        self._unused: dict[int, str] = {}
        self._touched: set[str] = set()
        self._copies: list[RecordedCopy] = []
        self._zeros: dict[str, list[Box]] = {}

    @property
    def touched(self) -> frozenset[str]:
        """Checkpoint tensors that the loader did anything with; the others it skipped."""
        return frozenset(self._touched)

    def result(self) -> RecordedLoad:
        """Everything recorded so far.

        Raises: ConfigError: a copy of a weight was made and kept elsewhere.
        """
        for name in self._unused.values():
            msg = f"loading makes a copy of checkpoint tensor {name} that goes into no parameter"
            raise ConfigError(msg)
        return RecordedLoad(copies=tuple(self._copies), zeros={name: tuple(found) for name, found in self._zeros.items()})

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Which box of which checkpoint tensor a view or a copy made from it holds; None if it holds none."""
        origin, box = self._origins.get(_storage_of(tensor)), self._box_behind(tensor)
        return None if origin is None or box is None else Origin(origin.name, tuple(tensor.shape), box)

    def _box_behind(self, view: Tensor) -> Box | None:
        origin = self._origins.get(_storage_of(view))
        part = None if origin is None else _box_in(origin.shape, view)
        return None if origin is None or part is None else origin.box_of(part)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - the signature that torch calls
        """Record writes into parameters; let everything else run that reads no weight's values."""
        self._touched.update(
            origin.name for tensor in _tensors((args, kwargs)) if (origin := self._origins.get(_storage_of(tensor))) is not None
        )
        if self._watch_only:
            return args[0] if func is _aten.copy_.default else func(*args, **(kwargs or {}))
        if func is _aten.copy_.default:
            return self._on_copy(args[0], args[1])
        if func in _FILLS and _storage_of(args[0]) in self._parameters:
            return self._on_fill(args[0], 0 if _FILLS[func] is None else args[1])
        answer = func(*args, **(kwargs or {}))
        if func in _PLAIN_COPIES and _storage_of(args[0]) not in self._parameters:
            self._follow(args[0], answer)
        elif func not in _SHAPE_ONLY:
            self._check_only_viewed(func, _tensors((args, kwargs)), answer)
        return answer

    def _on_copy(self, target: Tensor, source: Tensor) -> Tensor:
        owner = self._parameters.get(_storage_of(target))
        origin = self._origins.get(_storage_of(source))
        if owner is None:
            self._check_no_weight_is_lost(target, source, origin)
            return target
        name, parameter = owner
        if target.numel() == 0:
            return target
        if origin is None:
            self._refuse(target, "written with values that are computed, not a part of one checkpoint tensor")
        parameter_box = _box_in(tuple(parameter.shape), target)
        source_box = self._box_behind(source)
        if parameter_box is None or source_box is None or tuple(target.shape) != tuple(source.shape):
            self._refuse(target, f"written from {origin.name} in a way that is not a copy of a rectangle of the same shape")
        self._unused.pop(_storage_of(source), None)
        self._copies.append(RecordedCopy(name, origin.name, source_box, parameter_box))
        return target

    def _on_fill(self, target: Tensor, value: object) -> Tensor:
        name, parameter = self._parameters[_storage_of(target)]
        if target.numel() == 0:
            return target
        box = _box_in(tuple(parameter.shape), target)
        if box is None or not isinstance(value, int | float) or value != 0:
            self._refuse(target, f"filled with {value!r}, or in part; only rectangles of zeros are known as padding")
        self._zeros.setdefault(name, []).append(box)
        return target

    def _follow(self, source: Tensor, copied: Tensor) -> None:
        """A cast or a clone of a box of a checkpoint tensor still is that box."""
        origin = self._origins.get(_storage_of(source))
        if origin is None:
            return
        box = self._box_behind(source)
        if box is None or not copied.is_contiguous():
            msg = f"loading transposes, flattens or repeats checkpoint tensor {origin.name}"
            raise ConfigError(msg)
        self._unused.pop(_storage_of(source), None)
        self._unused[_storage_of(copied)] = origin.name
        self._origins[_storage_of(copied)] = Origin(origin.name, tuple(copied.shape), box)
        self._kept.append(copied)

    def _check_only_viewed(self, func: Callable[..., Any], inputs: Iterable[Tensor], answer: object) -> None:
        """Refuse an operator that reads or changes a weight's values."""
        views = {_storage_of(tensor) for tensor in _tensors(answer)}
        is_mutable = func._schema.is_mutable  # type: ignore[attr-defined]  # every torch operator has one
        for tensor in inputs:
            storage = _storage_of(tensor)
            if storage in views and not is_mutable:
                continue
            if storage in self._parameters:
                self._refuse(tensor, f"changed or read by {func}")
            if storage in self._origins:
                msg = f"loading computes with checkpoint tensor {self._origins[storage].name} ({func})"
                raise ConfigError(msg)

    def _check_no_weight_is_lost(self, target: Tensor, source: Tensor, origin: Origin | None) -> None:
        if origin is not None:
            msg = f"checkpoint tensor {origin.name} is loaded into a {list(target.shape)} buffer that is not a parameter"
            raise ConfigError(msg)
        if _storage_of(source) in self._parameters:
            self._refuse(source, "copied while loading")
        if _storage_of(target) in self._origins:
            msg = f"loading changes checkpoint tensor {self._origins[_storage_of(target)].name}"
            raise ConfigError(msg)

    def _refuse(self, target: Tensor, how: str) -> NoReturn:
        name = self._parameters[_storage_of(target)][0]
        msg = f"engine parameter {name} is {how}"
        raise ConfigError(msg)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _box_in(shape: tuple[int, ...], view: Tensor) -> Box | None:
    return box_of_view(shape, int(view.storage_offset()), tuple(view.shape), view.stride())


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
