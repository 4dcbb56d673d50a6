"""Reads this rank's part of a batch from Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import InvalidRequestError
from shoal.types import Batch, ExperienceRecord, Float32Array, MiniBatch
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext

MiniBatches = tuple[tuple[MicroBatch, ...], ...]


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


class BatchLoader:
    """Turns a batch into this rank's padded micro-batches."""

    def __init__(self, records: RecordSource, context: RankContext, run_id: str, vocab_size: int) -> None:
        self._records = records
        self._context = context
        self._run_id = run_id
        self._vocab_size = vocab_size

    def load(self, batch: Batch) -> MiniBatches:
        """Read and pad the records of this rank, all in one round trip.

        Raises: InvalidRequestError: the batch is of another run or for another number of ranks; or as the record source.
        """
        mini_batches = self._own_part(batch)
        keys = list(dict.fromkeys(ref.key for mini in mini_batches for micro in mini.micro_batches for ref in micro))
        records = dict(zip(keys, self._records.fetch(keys), strict=True)) if keys else {}
        return tuple(
            tuple(
                build_micro_batch(refs, [records[ref.key] for ref in refs], self._vocab_size).to(self._context.device)
                for refs in mini.micro_batches
            )
            for mini in mini_batches
        )

    def read_column(self, name: str, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Read a column of every record, padded per micro-batch: [B, T] float32 each."""
        keys = [key for micro in micro_batches for key in micro.keys]
        values = dict(zip(keys, self._records.read_column(name, keys), strict=True)) if keys else {}
        return [_padded(micro, values, name) for micro in micro_batches]

    def write_column(self, name: str, micro_batches: Sequence[MicroBatch], padded: Sequence[Tensor]) -> None:
        """Write a column given as one [B, T] tensor per micro-batch."""
        columns: dict[str, Float32Array] = {}
        for micro, values in zip(micro_batches, padded, strict=True):
            columns |= micro.unpad(values)
        if columns:
            self._records.write_columns(name, columns)

    def _own_part(self, batch: Batch) -> tuple[MiniBatch, ...]:
        if batch.run_id != self._run_id:
            raise InvalidRequestError(f"batch is of run {batch.run_id!r}, this gang trains run {self._run_id!r}")
        if len(batch.ranks) != self._context.world_size:
            raise InvalidRequestError(f"batch is split over {len(batch.ranks)} ranks, this gang has {self._context.world_size}")
        return batch.ranks[self._context.rank]


def flatten(mini_batches: MiniBatches) -> list[MicroBatch]:
    """All micro-batches in order."""
    return [micro for mini in mini_batches for micro in mini]


def _padded(micro: MicroBatch, values: Mapping[str, Float32Array], name: str) -> Tensor:
    padded = torch.zeros(micro.valid.shape, dtype=torch.float32)
    lengths = micro.valid.sum(dim=1).tolist()
    for row, (key, length) in enumerate(zip(micro.keys, lengths, strict=True)):
        if len(values[key]) != length:
            raise InvalidRequestError(f"column {name!r} of {key!r} has {len(values[key])} values for {length} response tokens")
        padded[row, :length] = torch.from_numpy(values[key])
    return padded.to(micro.valid.device)
