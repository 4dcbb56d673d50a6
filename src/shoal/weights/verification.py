"""VERIFY on an engine worker: staging holds, bucket by bucket, the bytes that the trainer wrote or says were there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import StateError
from shoal.types.weights import BucketEncoding, PairDigests
from shoal.weights import boxes
from shoal.weights.buckets import Bucket

_MAX_NAMES = 8
BucketKey = tuple[int, int]
"""Trainer rank and index of a bucket of one worker."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One bucket of this worker and what the trainer says about it."""

    bucket: Bucket
    xxh3: int
    encoding: BucketEncoding

    @property
    def key(self) -> BucketKey:
        """Identity among the worker's buckets."""
        return self.bucket.rank, self.bucket.index


def match_digests(worker_rank: int, buckets: Sequence[Bucket], pairs: Sequence[PairDigests]) -> tuple[Expected, ...]:
    """Give every planned bucket of a worker its digest.

    Args:
        buckets: all buckets that the plan has for this worker.
        pairs: those of all workers or of this one; others are skipped.
    Raises: StateError: not exactly one digest for each bucket; names the first bucket without, or the pair.
    """
    said: dict[BucketKey, tuple[int, BucketEncoding]] = {}
    for pair in pairs:
        if pair.worker_rank == worker_rank:
            for index, told in enumerate(zip(pair.xxh3, pair.encodings, strict=True)):
                if said.setdefault((pair.rank, index), told) is not told:
                    raise StateError(f"two digests came for bucket {index} of rank {pair.rank} for worker {worker_rank}; send one for each")
    expected = [Expected(bucket, *_taken(said, bucket)) for bucket in buckets]
    if said:
        rank, index = min(said)
        raise StateError(f"a digest came for bucket {index} of rank {rank} for worker {worker_rank}, which is not planned; plan anew")
    return tuple(expected)


def _taken(said: dict[BucketKey, tuple[int, BucketEncoding]], bucket: Bucket) -> tuple[int, BucketEncoding]:
    told = said.pop((bucket.rank, bucket.index), None)
    if told is None:
        raise StateError(f"no digest came for {describe_bucket(bucket)}; the trainer must send one for each bucket of the plan")
    return told


def verify_buckets(expected: Sequence[Expected], known: Mapping[BucketKey, int], digest_of: Callable[[Bucket], int]) -> Iterator[int]:
    """Check staged bytes bucket by bucket.

    Args:
        known: digests of buckets that staging held, verified, before this push; one that says UNCHANGED needs no hashing then.
        digest_of: xxh3-64 of a bucket's staged bytes.
    Returns: the bytes of each bucket as it is checked; a caller may stop in between and go on later.
    Raises: StateError: bytes differ, while it is iterated; names the bucket's first parameter.
    """
    for one in expected:
        is_known = one.encoding is BucketEncoding.UNCHANGED and known.get(one.key) == one.xxh3
        if not is_known and digest_of(one.bucket) != one.xxh3:
            was = ", which were not sent, " if one.encoding is BucketEncoding.UNCHANGED else " "
            raise StateError(f"staged bytes of {describe_bucket(one.bucket)}{was}differ from the trainer's; push everything again")
        yield one.bucket.num_bytes


def sent_parameters(expected: Sequence[Expected]) -> frozenset[str]:
    """Parameters that a bucket which was sent wrote to."""
    return frozenset(piece.parameter for one in expected if one.encoding is not BucketEncoding.UNCHANGED for piece in one.bucket.pieces)


def describe_bucket(bucket: Bucket) -> str:
    """For messages: which parameters a bucket holds parts of, and where it belongs."""
    names = list(dict.fromkeys(piece.parameter for piece in bucket.pieces))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    box = f" {boxes.describe(bucket.pieces[0].parameter_box)}" if len(bucket.pieces) == 1 else ""
    where = f"worker {bucket.worker_rank} (bucket {bucket.index} of rank {bucket.rank})"
    return f"{', '.join(names[:_MAX_NAMES])}{more}{box} on {where}"
