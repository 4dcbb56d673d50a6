"""Reads this rank's part of a batch from Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import InvalidRequestError
from shoal.types import Batch, ExperienceRecord, Float32Array, MiniBatch, RecordRef
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.buckets import split_by_length
from shoal_trainer.distributed import RankContext

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


class BatchLoader:
    """Turns a batch into this rank's padded micro-batches.

    Args:
        records: where records are.
        run_id: batches of other runs are refused.
        vocab_size: ids outside of it cannot be trained on.
        overhead_tokens: cost of one more pass, see `shoal_trainer.buckets`.
    """

    def __init__(self, records: RecordSource, context: RankContext, run_id: str, vocab_size: int, overhead_tokens: float) -> None:
        self._records = records
        self._context = context
        self._run_id = run_id
        self._vocab_size = vocab_size
        self._overhead_tokens = overhead_tokens

    def load(self, batch: Batch) -> Loaded:
        """Read the records of this rank, all in one round trip.

        Raises: InvalidRequestError: the batch is of another run or for another number of ranks; or as the record source.
        """
        mini_batches = self._own_part(batch)
        keys = list(dict.fromkeys(ref.key for mini in mini_batches for micro in mini.micro_batches for ref in micro))
        records = dict(zip(keys, self._records.fetch(keys), strict=True)) if keys else {}
        return [[[(ref, records[ref.key]) for ref in micro] for micro in mini.micro_batches] for mini in mini_batches]

    def pad(self, loaded: Loaded) -> MiniBatches:
        """Cut micro-batches into passes of similar length and pad them; every rank gets equally many. Enters a collective."""
        cut = [[self._cut(micro) for micro in mini] for mini in loaded]
        own_counts = torch.tensor([float(len(passes)) for mini in cut for passes in mini], device=self._context.device)
        counts = iter(self._context.max_over_ranks(own_counts).int().tolist() if own_counts.numel() else [])
        return tuple(tuple(self._build(part) for passes in mini for part in _filled(passes, next(counts))) for mini in cut)

    def _cut(self, micro: Pairs) -> list[Pairs]:
        lengths = [len(record.prompt_ids) + len(record.response_ids) for _, record in micro]
        return [[micro[index] for index in bucket] for bucket in split_by_length(lengths, self._overhead_tokens)]

    def _build(self, pairs: Pairs) -> MicroBatch:
        refs, records = [ref for ref, _ in pairs], [record for _, record in pairs]
        return build_micro_batch(refs, records, self._vocab_size).to(self._context.device)

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


def _filled(passes: list[Pairs], count: int) -> list[Pairs]:
    """At least one pass, and as many as the rank with the most has."""
    return [*passes, *([] for _ in range(max(count, 1) - len(passes)))]


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
