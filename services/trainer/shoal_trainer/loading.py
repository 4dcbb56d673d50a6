"""Reads this rank's part of a batch from Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import InvalidRequestError
from shoal.types import Batch, ExperienceRecord, Float32Array, RecordRef
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.buckets import split_by_length
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout, pad_rows

MiniBatches = tuple[tuple[MicroBatch, ...], ...]
Pairs = list[tuple[RecordRef, ExperienceRecord]]
Loaded = list[list[Pairs]]
"""Mini-batches of micro-batches of records."""


class RecordSource(Protocol):
    """Where records and columns are; `shoal.queue.records.RecordReader`."""

    def fetch(self, record_keys: Sequence[str]) -> list[ExperienceRecord]:
        """Read records in the order of their keys."""
        ...

    def write_columns(self, name: str, columns: Mapping[str, Float32Array]) -> None:
        """Write one column of several records."""
        ...

    def read_column(self, name: str, record_keys: Sequence[str]) -> list[Float32Array]:
        """Read one column of several records."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFormat:
    """What a gang's passes hold.

    vocab_size: ids outside of it cannot be trained on.
    overhead_tokens: cost of one more pass, see `shoal_trainer.buckets`; infinite: one pass per micro-batch.
    layout, component_names, feed_cut_ends: as `build_micro_batch`.
    """

    vocab_size: int
    overhead_tokens: float
    layout: Layout = pad_rows
    component_names: tuple[str, ...] = ()
    feed_cut_ends: bool = False


class BatchLoader:
    """Turns a batch into this rank's micro-batches.

    Args:
        records: where records are.
        run_id: batches of other runs are refused.
        passes: what the passes hold.
    """

    def __init__(self, records: RecordSource, context: RankContext, run_id: str, passes: PassFormat) -> None:
        self._records = records
        self._context = context
        self._run_id = run_id
        self._passes = passes

    def load(self, batch: Batch) -> Loaded:
        """Read the records of this rank, all in one round trip.

        Raises: InvalidRequestError: the batch is of another run or for another number of ranks; or as the record source.
        """
        mini_batches = self._own_part(batch)
        keys = list(dict.fromkeys(ref.key for mini in mini_batches for micro in mini for ref in micro))
        records = dict(zip(keys, self._records.fetch(keys), strict=True)) if keys else {}
        return [[[(ref, records[ref.key]) for ref in micro] for micro in mini] for mini in mini_batches]

    def pad(self, loaded: Loaded) -> MiniBatches:
        """Cut micro-batches into passes of similar length and pad them; every rank gets equally many. Enters a collective."""
        cut = [[self._cut(micro) for micro in mini] for mini in loaded]
        own_counts = torch.tensor([float(len(passes)) for mini in cut for passes in mini], device=self._context.device)
        counts = iter(self._context.max_over_ranks(own_counts).int().tolist() if own_counts.numel() else [])
        return tuple(tuple(self._build(part) for passes in mini for part in _filled(passes, next(counts))) for mini in cut)

    def read_column(self, name: str, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Read a column with a value per response token, padded per micro-batch: [B, T] float32 each."""
        columns = self._read(name, micro_batches)
        try:
            return [micro.pad_column([columns[key] for key in micro.keys]) for micro in micro_batches]
        except ValueError as error:
            raise InvalidRequestError(f"column {name!r}: {error}") from error

    def read_scalars(self, name: str, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Read a column with one value per record: [B] float32 per micro-batch."""
        columns = self._read(name, micro_batches)
        for key, column in columns.items():
            if len(column) != 1:
                raise InvalidRequestError(f"column {name!r} of {key!r} has {len(column)} values; it should have one")
        values = [[float(columns[key][0]) for key in micro.keys] for micro in micro_batches]
        return [torch.tensor(value, dtype=torch.float32, device=self._context.device) for value in values]

    def write_column(self, name: str, micro_batches: Sequence[MicroBatch], padded: Sequence[Tensor]) -> None:
        """Write a column given as one [B, T] tensor per micro-batch."""
        columns: dict[str, Float32Array] = {}
        for micro, values in zip(micro_batches, padded, strict=True):
            columns |= micro.unpad(values)
        self._write(name, columns)

    def write_scalars(self, name: str, micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> None:
        """Write a column given as one [B] tensor per micro-batch."""
        columns: dict[str, Float32Array] = {}
        for micro, of_micro in zip(micro_batches, values, strict=True):
            rows = of_micro.detach().float().cpu().numpy()[:, None]
            columns |= {key: rows[row].copy() for row, key in enumerate(micro.keys)}
        self._write(name, columns)

    def _read(self, name: str, micro_batches: Sequence[MicroBatch]) -> dict[str, Float32Array]:
        keys = [key for micro in micro_batches for key in micro.keys]
        return dict(zip(keys, self._records.read_column(name, keys), strict=True)) if keys else {}

    def _write(self, name: str, columns: Mapping[str, Float32Array]) -> None:
        if columns:
            self._records.write_columns(name, columns)

    def _cut(self, micro: Pairs) -> list[Pairs]:
        lengths = [len(record.prompt_ids) + len(record.response_ids) for _, record in micro]
        return [[micro[index] for index in bucket] for bucket in split_by_length(lengths, self._passes.overhead_tokens)]

    def _build(self, pairs: Pairs) -> MicroBatch:
        refs, records = [ref for ref, _ in pairs], [record for _, record in pairs]
        passes = self._passes
        return build_micro_batch(
            refs,
            records,
            passes.vocab_size,
            layout=passes.layout,
            component_names=passes.component_names,
            feed_cut_ends=passes.feed_cut_ends,
        ).to(self._context.device)

    def _own_part(self, batch: Batch) -> list[list[tuple[RecordRef, ...]]]:
        """This rank's mini-batches of micro-batches, as many of each as the rank with the most has: all must run the same passes."""
        if batch.run_id != self._run_id:
            raise InvalidRequestError(f"batch is of run {batch.run_id!r}, this gang trains run {self._run_id!r}")
        if len(batch.ranks) != self._context.world_size:
            raise InvalidRequestError(f"batch is split over {len(batch.ranks)} ranks, this gang has {self._context.world_size}")
        num_mini = max(len(rank) for rank in batch.ranks)
        of_ranks = [[mini.micro_batches for mini in rank] + [()] * (num_mini - len(rank)) for rank in batch.ranks]
        most = [max(1, *(len(minis[index]) for minis in of_ranks)) for index in range(num_mini)]
        return [[*micros, *([()] * (count - len(micros)))] for micros, count in zip(of_ranks[self._context.rank], most, strict=True)]


def _filled(passes: list[Pairs], count: int) -> list[Pairs]:
    """At least one pass, and as many as the rank with the most has."""
    return [*passes, *([] for _ in range(max(count, 1) - len(passes)))]


def flatten(mini_batches: MiniBatches) -> list[MicroBatch]:
    """All micro-batches in order."""
    return [micro for mini in mini_batches for micro in mini]
