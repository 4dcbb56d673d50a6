"""What engines serve of a policy with adapters: W + scale * B A under the base model's names, from shards and without a whole matrix.

Legend: r inner dimension of an adapter. W is [out, in], A [r, in], B [out, r].

A rank has the rows of B that belong to its rows of W. Of A it has a part; every rank keeps a whole copy, gathered after every update.
Elements are computed in float32, tile by tile, and tiles lie at the same places whatever part is asked for. So an element has the same
bits in every bucket, digest, comparison and export of a version: how a library sums depends on the shape that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.config.gang import LoraSection
from shoal.errors import TransportError
from shoal.types.weights import Box
from shoal_trainer.lora import ADAPTER
from shoal_trainer.source_layout import HeldBox, held_boxes, local_tensor

TILE_ROWS, TILE_COLUMNS = 256, 1024
"""Elements that are computed at once: 1 MiB in float32."""

_BASE, _DOWN, _UP = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."

Parameter = DTensor | Tensor


@dataclass(frozen=True, slots=True)
class _Range:
    """Indices start <= i < end of a dim."""

    start: int
    end: int

    def tiles(self, size: int) -> Iterator[_Range]:
        """The tiles of `size` indices, counted from 0, that overlap."""
        for first in range(self.start - self.start % size, self.end, size):
            yield _Range(first, first + size)

    def within(self, other: _Range) -> _Range:
        """The part that lies in another range."""
        return _Range(max(self.start, other.start), min(self.end, other.end))

    def seen_from(self, start: int) -> slice:
        """The same indices counted from another one."""
        return slice(self.start - start, self.end - start)


class MergedWeight:
    """A matrix with an adapter, as the engines get it. `gather` first, and after every change of A.

    Args:
        name: of the matrix, for errors.
        base: W, sharded in any way.
        down: A.
        up: B, sharded so that a rank has all columns of the rows that it has of W.
        scale: of B A.
        policy_version: tells the version of W, A and B as they are.
    """

    def __init__(self, name: str, base: Parameter, down: Parameter, up: Parameter, scale: float, policy_version: Callable[[], int]) -> None:
        self.name = name
        self.base = base
        self._down = down
        self._up = up
        self._scale = scale
        self._policy_version = policy_version
        self._held_up = held_boxes(name, up)
        self._whole_down: Tensor | None = None
        self._gathered_version = -1

    def gather(self, device: torch.device) -> None:
        """Keep the whole of A where W is; enters a collective, which works on `device`."""
        self._whole_down = _whole(self._down, device).to(local_tensor(self.base).device)
        self._gathered_version = self._policy_version()

    def write(self, held: HeldBox, box: Box, target: Tensor) -> None:
        """Compute a part.

        Args:
            held: where this rank holds it of W.
            box: the part, within `held`.
            target: of the box's shape; gets the values, cast to its dtype.
        Raises: TransportError: A has changed since it was gathered, or this rank does not hold the rows of B.
        """
        base, down, up = self._factors(held)
        starts = (box.offsets[dim] - held.box.offsets[dim] for dim in (0, 1))
        rows, columns = (_Range(start, start + size) for start, size in zip(starts, box.sizes, strict=True))
        for tile_rows in rows.tiles(TILE_ROWS):
            for tile_columns in columns.tiles(TILE_COLUMNS):
                at_rows, at_columns = tile_rows.seen_from(0), tile_columns.seen_from(0)
                tile = torch.addmm(base[at_rows, at_columns], up[at_rows], down[:, at_columns], alpha=self._scale)
                wanted_rows, wanted_columns = tile_rows.within(rows), tile_columns.within(columns)
                part = tile[wanted_rows.seen_from(tile_rows.start), wanted_columns.seen_from(tile_columns.start)]
                target[wanted_rows.seen_from(rows.start), wanted_columns.seen_from(columns.start)] = part

    def shard(self) -> Parameter:
        """A new tensor that holds this rank's part of the whole, sharded as W. Raises: as `write`."""
        local = torch.empty_like(local_tensor(self.base))
        for held in held_boxes(self.name, self.base):
            view = local
            for dim, (offset, size) in enumerate(zip(held.local_offsets, held.box.sizes, strict=True)):
                view = view.narrow(dim, offset, size)
            self.write(held, held.box, view)
        base = self.base
        if not isinstance(base, DTensor):
            return local
        return DTensor.from_local(local, base.device_mesh, base.placements, run_check=False, shape=base.shape, stride=base.stride())

    def _factors(self, held: HeldBox) -> tuple[Tensor, Tensor, Tensor]:
        """The held box of W, and the rows of B and columns of A that belong to it; views."""
        if self._whole_down is None or self._gathered_version != self._policy_version():
            versions = f"gathered for version {self._gathered_version}, and the policy is {self._policy_version()}"
            raise TransportError(f"the adapter of {self.name} was {versions}; gather it after every update")
        base = local_tensor(self.base)
        for dim in (0, 1):
            base = base.narrow(dim, held.local_offsets[dim], held.box.sizes[dim])
        columns = _Range(held.box.offsets[1], held.box.offsets[1] + held.box.sizes[1])
        return base, self._whole_down[:, columns.seen_from(0)], self._rows_of_up(held)

    def _rows_of_up(self, held: HeldBox) -> Tensor:
        start, size = held.box.offsets[0], held.box.sizes[0]
        for box in self._held_up:
            skipped = start - box.box.offsets[0]
            if skipped >= 0 and skipped + size <= box.box.sizes[0] and box.box.sizes[1] == self._up.shape[1]:
                return local_tensor(self._up).narrow(0, box.local_offsets[0] + skipped, size)
        raise TransportError(f"this rank holds rows {start}:{start + size} of {self.name}, but not of its adapter; shard both alike")


class ServedWeights:
    """The parameters of a policy as engines and exports have them, under their Hugging Face names.

    Every rank makes it, and calls `gather` after every update: both enter collectives.

    Args:
        named_parameters: the policy's, adapters among them.
        lora: the adapters; None if there are none.
        device: where collectives work.
        policy_version: tells the version of the parameters as they are; what was gathered of another one is never served.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, DTensor],
        lora: LoraSection | None,
        device: torch.device,
        policy_version: Callable[[], int],
    ) -> None:
        self.lora = lora
        self._device = device
        self.parameters: dict[str, DTensor | MergedWeight] = {}
        self.adapters: dict[str, DTensor] = {}
        for name, parameter in named_parameters.items():
            if _DOWN in name or _UP in name:
                self.adapters[name] = parameter
            elif lora is not None and name.endswith(f"{_BASE}weight"):
                served = name.replace(_BASE, ".")
                down, up = (named_parameters[name.replace(_BASE, part)] for part in (_DOWN, _UP))
                self.parameters[served] = MergedWeight(served, parameter, down, up, lora.alpha / lora.rank, policy_version)
            else:
                self.parameters[name.replace(_BASE, ".")] = parameter
        self.gather()

    @property
    def adapted_layers(self) -> list[str]:
        """Names of the layers that have an adapter."""
        return [name.partition(_DOWN)[0] for name in self.adapters if _DOWN in name]

    def gather(self) -> None:
        """Gather what a rank needs of others to compute what is served; enters a collective if there are adapters."""
        for parameter in self.parameters.values():
            if isinstance(parameter, MergedWeight):
                parameter.gather(self._device)


def whole_on_rank_0(parameter: Parameter | MergedWeight, device: torch.device, rank: int) -> Tensor | None:
    """Gather a parameter as it is served; enters a collective.

    Args:
        device: where collectives work; parameters may be kept elsewhere.
    Returns: the whole on rank 0's CPU; None on the other ranks.
    """
    shard = parameter.shard() if isinstance(parameter, MergedWeight) else parameter
    whole = _whole(shard, device)
    return whole.cpu().contiguous() if rank == 0 else None


def _whole(parameter: Parameter, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    # A collective over GPUs takes no tensor that is kept on the host.
    local = local_tensor(parameter).to(device)
    mesh, placements = parameter.device_mesh, parameter.placements
    here = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    whole: Tensor = here.full_tensor()
    return whole
