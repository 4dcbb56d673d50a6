"""From live parameters to the boxes that this rank holds of them, without communication.

A placement cuts a tensor dim into chunks over a mesh dim. What a rank holds of one dim is a list of runs of indices, in the order in which
they lie in the local tensor; the boxes are the products of the runs of all dims. Almost always there is one run per dim, hence one box:
only a strided shard without a shard beside it leaves several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shoal.errors import TransportError
from shoal.types.weights import Box, SourceTensor, TensorShard
from shoal.weights import boxes

Run: TypeAlias = tuple[int, int]
"""Start and length of consecutive indices of a dim."""

_Order: TypeAlias = Callable[[Sequence[tuple[int, Placement]], Sequence[int]], list["_Cut"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBox:
    """A box of the whole tensor that this rank holds, and where it starts in the local tensor."""

    box: Box
    local_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One mesh dim's share in cutting a tensor dim: first into `split_factor` parts, then each into one chunk per coordinate."""

    mesh_dim: int
    split_factor: int


def local_tensor(parameter: DTensor | Tensor) -> Tensor:
    """This rank's part of a parameter, without communication or autograd."""
    with torch.no_grad():
        return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def held_boxes(name: str, parameter: DTensor | Tensor) -> tuple[HeldBox, ...]:
    """Where the elements of this rank's part lie in the whole tensor; () if it has none.

    Args:
        name: for errors.
        parameter: a plain tensor counts as whole.
    Raises: TransportError: a placement that is no cut (Partial), or a local part of another shape than its placements say.
    """
    if not isinstance(parameter, DTensor):
        whole = boxes.whole(tuple(parameter.shape))
        return (HeldBox(box=whole, local_offsets=whole.offsets),) if whole.num_elements else ()
    _check_placements(name, parameter.placements)
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    local_shape = tuple(local_tensor(parameter).shape)
    for order in (_fsdp_order, _written_order):
        runs = [_runs_of_dim(dim, parameter, coordinate, order) for dim in range(parameter.dim())]
        if tuple(sum(length for _, length in dim_runs) for dim_runs in runs) == local_shape:
            return _products(runs)
    shapes = f"{name} of shape {list(parameter.shape)} holds a local part of shape {list(local_shape)}"
    msg = f"{shapes}, which its placements {parameter.placements} do not say"
    raise TransportError(msg)


class ComputedTensor(Protocol):
    """A trained tensor that is computed where it is read; its shape, dtype and shards are those of `base`."""

    @property
    def base(self) -> DTensor | Tensor:
        """The live parameter that it is like."""
        ...

    def write(self, held: HeldBox, box: Box, target: Tensor) -> None:
        """Compute a box, which lies in a held one, into a tensor of the box's shape and any dtype."""
        ...


class HeldTensors:
    """The parameters of one rank as a push sees them: which boxes it holds, and the values of any part of these.

    Args:
        named_parameters: Hugging Face name to live parameter, or to what is computed from several.
        rank: this process in the gang.
    Raises: TransportError: as `held_boxes`.
    """

    def __init__(self, named_parameters: Mapping[str, DTensor | Tensor | ComputedTensor], rank: int) -> None:
        self._rank = rank
        self._computed = {name: one for name, one in named_parameters.items() if not isinstance(one, Tensor)}
        self._parameters = {name: one if isinstance(one, Tensor) else one.base for name, one in named_parameters.items()}
        self._held = {name: held_boxes(name, parameter) for name, parameter in self._parameters.items()}
        frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        self._frozen = frozenset(frozen - self._computed.keys())

    def describe(self) -> tuple[SourceTensor, ...]:
        """Every tensor with the boxes of this rank alone; none where its shard is empty."""
        return tuple(
            SourceTensor(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                shards=tuple(TensorShard(rank=self._rank, box=held.box) for held in self._held[name]),
                frozen=self.is_frozen(name),
            )
            for name, parameter in self._parameters.items()
        )

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter was not to be trained when this object was made."""
        return name in self._frozen

    def item_bytes(self, name: str) -> int:
        """Bytes of an element of the live parameter."""
        return self._parameters[name].element_size()

    def device(self, name: str) -> torch.device:
        """Where this rank keeps its part."""
        return local_tensor(self._parameters[name]).device

    def holder(self, name: str, box: Box) -> HeldBox:
        """The held box that a box of the whole tensor lies in.

        Raises: TransportError: this rank does not hold it.
        """
        for held in self._held.get(name, ()):
            if boxes.contains(held.box, box):
                return held
        msg = f"rank {self._rank} does not hold {boxes.describe(box)} of {name}; prepare the push again"
        raise TransportError(msg)

    def piece(self, name: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """The elements of a box of the whole tensor: a view of the live parameter, or a new tensor of what is computed.

        Args:
            dtype: of what is computed; None is that of the live parameter, which views have always.
        Raises: TransportError: this rank does not hold it.
        """
        if name in self._computed:
            computed = torch.empty(box.sizes, dtype=self._parameters[name].dtype if dtype is None else dtype, device=self.device(name))
            self.copy_piece(name, box, computed)
            return computed
        return self._view(name, box)

    def copy_piece(self, name: str, box: Box, target: Tensor) -> None:
        """Copy the elements of a box into a tensor of its shape and any dtype; holds no second copy. Raises: as `piece`."""
        if name in self._computed:
            with torch.no_grad():
                self._computed[name].write(self.holder(name, box), box, target)
        else:
            target.copy_(self._view(name, box))

    def _view(self, name: str, box: Box) -> Tensor:
        held = self.holder(name, box)
        view = local_tensor(self._parameters[name])
        for dim, (start, offset, size) in enumerate(zip(held.local_offsets, box.offsets, box.sizes, strict=True)):
            view = view.narrow(dim, start + offset - held.box.offsets[dim], size)
        return view


def _check_placements(name: str, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if isinstance(placement, Partial):
            msg = f"{name} has placement {placement}: its values are still to be added over ranks; redistribute it before a push"
            raise TransportError(msg)
        if type(placement) not in (Shard, Replicate, _StridedShard):
            msg = f"{name} has placement {placement}; a push reads Shard, _StridedShard and Replicate"
            raise TransportError(msg)


def _runs_of_dim(dim: int, parameter: DTensor, coordinate: Sequence[int], order: _Order) -> list[Run]:
    """What a rank holds along one dim of the tensor."""
    mesh = parameter.device_mesh
    cutting = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    ]
    runs = [(0, parameter.shape[dim])]
    for cut in order(cutting, mesh.shape):
        parts = [_chunk(runs, cut.split_factor, index) for index in range(cut.split_factor)]
        runs = [run for part in parts for run in _chunk(part, mesh.shape[cut.mesh_dim], coordinate[cut.mesh_dim])]
    return _joined(runs)


def _written_order(cutting: Sequence[tuple[int, Placement]], mesh_shape: Sequence[int]) -> list[_Cut]:
    """From left to right, as torch itself reads placements."""
    return [_Cut(mesh_dim, _split_factor(placement)) for mesh_dim, placement in cutting]


def _fsdp_order(cutting: Sequence[tuple[int, Placement]], mesh_shape: Sequence[int]) -> list[_Cut]:
    """What FSDP2 does to a tensor-parallel parameter: the later mesh dims cut first, then FSDP cuts what is left.

    Its strided shard names that number of earlier parts. Reading it from left to right instead gives the same for even shards only:
    FSDP2's shards of uneven parts are not those that torch's own reading tells.
    """
    cuts: list[_Cut] = []
    for mesh_dim, placement in reversed(cutting):
        later = math.prod(mesh_shape[other] for other, _ in cutting if other > mesh_dim)
        if isinstance(placement, _StridedShard) and _split_factor(placement) == later > 1:
            cuts.append(_Cut(mesh_dim, 1))
        else:
            cuts.insert(0, _Cut(mesh_dim, _split_factor(placement)))
    return cuts


def _split_factor(placement: Placement) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _chunk(runs: Sequence[Run], num_chunks: int, index: int) -> list[Run]:
    """One of the chunks of the indices that the runs list, as torch.chunk makes them: all of one size but the last ones."""
    size = -(-sum(length for _, length in runs) // num_chunks)
    first, end = index * size, (index + 1) * size
    chunk, position = [], 0
    for start, length in runs:
        low, high = max(first - position, 0), min(end - position, length)
        if low < high:
            chunk.append((start + low, high - low))
        position += length
    return chunk


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The same indices with neighbouring runs made one."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _products(runs: Sequence[Sequence[Run]]) -> tuple[HeldBox, ...]:
    """One box for every choice of a run per dim; a scalar has one."""
    located = []
    for dim_runs in runs:
        starts = itertools.accumulate((length for _, length in dim_runs), initial=0)
        located.append([(start, length, local) for (start, length), local in zip(dim_runs, starts, strict=False)])
    held = (
        HeldBox(
            box=Box(offsets=tuple(start for start, _, _ in choice), sizes=tuple(length for _, length, _ in choice)),
            local_offsets=tuple(local for _, _, local in choice),
        )
        for choice in itertools.product(*located)
    )
    return tuple(one for one in held if one.box.num_elements)
