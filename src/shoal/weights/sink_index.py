"""The engine's side of a plan: parameters and regions of all workers of one server, checked against the trainer's tensors."""

from __future__ import annotations

import math

import numpy as np

from shoal.errors import TransportError
from shoal.types.weights import SinkLayout, SinkParameter, SinkRegion, SinkWorkerLayout
from shoal.weights import boxes
from shoal.weights.box_table import BoxTable, Ints, pad_rows
from shoal.weights.dtypes import is_castable, item_bytes
from shoal.weights.source_index import TIED_HEAD, SourceIndex, check_unique


class SinkIndex:
    """Parameters by worker rank and place in staging, whatever the layout's order; regions as two tables with equal rows.

    `sources` [R] are the regions' parts of tensors (owner = tensor), `targets` [R] of parameters (owner = parameter); `worker_of`,
    `item_bytes`, `staging_offsets` and `dtype_order` are by parameter.
    """

    def __init__(self, layout: SinkLayout, source: SourceIndex) -> None:
        """Check and index a layout. Raises: TransportError: what does not fit, with the tensor's name."""
        self.server_id = layout.server_id
        self.workers = tuple(sorted(layout.workers, key=lambda worker: worker.worker_rank))
        check_unique([worker.worker_rank for worker in self.workers], f"worker rank of server {layout.server_id}")
        self.parameters: list[SinkParameter] = []
        self._where: list[str] = []
        worker_of: list[int] = []
        self._regions: list[SinkRegion] = []
        owners: list[int] = []
        for worker in self.workers:
            owners += self._add_worker(worker)
            worker_of += [worker.worker_rank] * len(worker.parameters)
        self.worker_of: Ints = np.array(worker_of, np.int64)
        self._index_parameters()
        self.targets = BoxTable.of(owners, [region.parameter_box for region in self._regions])
        self._check_targets()
        tensors = [source.resolve(region.source_name, region.parameter) for region in self._regions]
        self.sources = BoxTable.of(tensors, [region.source_box for region in self._regions])
        self._check_sources(source)

    def _add_worker(self, worker: SinkWorkerLayout) -> list[int]:
        """Append a worker's parameters and regions; answers the parameter of each region."""
        where = f"worker {worker.worker_rank} of server {self.server_id}"
        # An empty parameter may lie at the start of the next one.
        parameters = sorted(worker.parameters, key=lambda one: (one.staging_offset_bytes, math.prod(one.shape) > 0, one.name))
        check_unique([parameter.name for parameter in parameters], f"parameter of {where}")
        _check_staging(parameters, worker.staging_bytes, where)
        index_of = {parameter.name: len(self.parameters) + index for index, parameter in enumerate(parameters)}
        unlisted = next((region.parameter for region in worker.regions if region.parameter not in index_of), None)
        if unlisted is not None:
            msg = f"{where} wants a region of {unlisted}, which it does not list"
            raise TransportError(msg)
        self.parameters += parameters
        self._where += [where] * len(parameters)
        self._regions += worker.regions
        return [index_of[region.parameter] for region in worker.regions]

    def _index_parameters(self) -> None:
        count = len(self.parameters)
        self.dtypes = tuple(sorted({parameter.dtype for parameter in self.parameters}))
        order = {dtype: index for index, dtype in enumerate(self.dtypes)}
        self.dtype_order: Ints = np.fromiter((order[parameter.dtype] for parameter in self.parameters), np.int64, count)
        self.staging_offsets: Ints = np.fromiter((parameter.staging_offset_bytes for parameter in self.parameters), np.int64, count)
        sizes = (item_bytes(parameter.dtype, parameter.name) for parameter in self.parameters)
        self.item_bytes: Ints = np.fromiter(sizes, np.int64, count)

    def strides(self, width: int) -> Ints:
        """[parameters, width] row-major strides in elements, of shapes padded to `width` dims."""
        shapes = pad_rows([parameter.shape for parameter in self.parameters], width, 1)
        inner = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
        return np.concatenate((inner, np.ones((len(shapes), 1), np.int64)), axis=1)

    def _check_targets(self) -> None:
        outside = self.targets.outside([parameter.shape for parameter in self.parameters])
        if outside.size:
            region = self._regions[int(outside[0])]
            parameter, where = self._target(int(outside[0]))
            box = boxes.describe(region.parameter_box)
            msg = f"{parameter.name} of {where} has shape {list(parameter.shape)}; region {box} lies outside"
            raise TransportError(msg)
        overlap = self.targets.find_overlap()
        if overlap is not None:
            parameter, where = self._target(overlap[0])
            left, right = (boxes.describe(self._regions[row].parameter_box) for row in overlap)
            msg = f"{parameter.name} of {where} has overlapping regions {left} and {right}"
            raise TransportError(msg)
        # Part of a parameter may stay as it is (vocabulary padding), but one that takes nothing was forgotten.
        for index in np.flatnonzero(np.bincount(self.targets.owners, minlength=len(self.parameters)) == 0):
            parameter = self.parameters[index]
            if boxes.whole(parameter.shape).num_elements > 0:
                msg = f"{parameter.name} of {self._where[index]} has no region; no trained tensor would reach it"
                raise TransportError(msg)

    def _check_sources(self, source: SourceIndex) -> None:
        """Every region fits its tensor, and every tensor is used."""
        outside = self.sources.outside([tensor.shape for tensor in source.tensors])
        if outside.size:
            region, tensor = self._regions[int(outside[0])], source.tensors[self.sources.owners[outside[0]]]
            box = boxes.describe(region.source_box)
            msg = f"{region.parameter} needs {box} of {tensor.name}, which has shape {list(tensor.shape)} on the trainer"
            raise TransportError(msg)
        self._check_sizes(source)
        self._check_dtypes(source)
        used = np.bincount(self.sources.owners, minlength=len(source.tensors))
        unused = [source.tensors[index].name for index in np.flatnonzero(used == 0) if source.tensors[index].name != TIED_HEAD]
        if unused:
            msg = f"server {self.server_id} takes nothing of {len(unused)} trained tensors, first {unused[0]}; do both hold the same model?"
            raise TransportError(msg)

    def _check_sizes(self, source: SourceIndex) -> None:
        width = max(self.sources.width, self.targets.width)
        self.sources, self.targets = self.sources.widen(width), self.targets.widen(width)
        unequal = (self.sources.sizes != self.targets.sizes).any(axis=1) | (self.sources.num_dims != self.targets.num_dims)
        if unequal.any():
            row = int(np.argmax(unequal))
            region, tensor = self._regions[row], source.tensors[self.sources.owners[row]]
            left, right = boxes.describe(region.source_box), boxes.describe(region.parameter_box)
            msg = f"{region.parameter} maps {left} of {tensor.name} to {right}; the sizes differ"
            raise TransportError(msg)

    def _check_dtypes(self, source: SourceIndex) -> None:
        names = sorted({tensor.dtype for tensor in source.tensors})
        kinds = np.array([names.index(tensor.dtype) for tensor in source.tensors], np.int64)
        castable = np.array([[is_castable(name, dtype) for dtype in self.dtypes] for name in names], np.bool_).reshape(len(names), -1)
        refused = np.flatnonzero(~castable[kinds[self.sources.owners], self.dtype_order[self.targets.owners]])
        if refused.size:
            parameter, _ = self._target(int(refused[0]))
            tensor = source.tensors[self.sources.owners[refused[0]]]
            msg = f"{parameter.name} is {parameter.dtype} but {tensor.name} is {tensor.dtype}, which is not cast"
            raise TransportError(msg)

    def _target(self, row: int) -> tuple[SinkParameter, str]:
        """The parameter of a region and whose it is."""
        index = int(self.targets.owners[row])
        return self.parameters[index], self._where[index]


def _check_staging(parameters: list[SinkParameter], staging_bytes: int, where: str) -> None:
    """Parameters, in the order of staging, lie one behind the other inside the buffer."""
    end, previous = 0, "the start"
    for parameter in parameters:
        num_bytes = boxes.whole(parameter.shape).num_elements * item_bytes(parameter.dtype, parameter.name)
        if parameter.staging_offset_bytes < end:
            msg = f"{parameter.name} of {where} is staged at byte {parameter.staging_offset_bytes}, inside {previous}"
            raise TransportError(msg)
        end, previous = parameter.staging_offset_bytes + num_bytes, parameter.name
        if end > staging_bytes:
            msg = f"{parameter.name} of {where} ends at byte {end} of a staging buffer of {staging_bytes}"
            raise TransportError(msg)
