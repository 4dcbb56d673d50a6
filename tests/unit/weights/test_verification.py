"""Digests of buckets against staging.

Invariants: exactly one digest for each bucket; a bucket that was sent is always hashed; one that was not is right only if its bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shoal.errors import StateError
from shoal.types.weights import BucketEncoding, PairDigests
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.verification import Expected, describe_bucket, match_digests, sent_parameters, verify_buckets
from tests.helpers.layouts import box

DENSE, DELTA, UNCHANGED = BucketEncoding


def _bucket(rank: int, index: int, *parameters: str) -> Bucket:
    piece_box = box((0, 4))
    pieces = tuple(Piece(parameter=name, source_name=name, source_box=piece_box, parameter_box=piece_box) for name in parameters)
    return Bucket(rank=rank, worker_rank=1, index=index, dtype="float32", pieces=pieces, num_bytes=16 * len(pieces))


BUCKETS = (_bucket(0, 0, "a"), _bucket(0, 1, "b", "c"), _bucket(2, 0, "d"))
PAIRS = (
    PairDigests(rank=0, worker_rank=1, xxh3=(10, 11), encodings=(DENSE, UNCHANGED)),
    PairDigests(rank=0, worker_rank=0, xxh3=(99,), encodings=(DENSE,)),
    PairDigests(rank=2, worker_rank=1, xxh3=(20,), encodings=(DELTA,)),
)
EXPECTED = match_digests(1, BUCKETS, PAIRS)


class _Staging:
    def __init__(self, digests: Sequence[int] = (10, 11, 20)) -> None:
        self.digests = {(bucket.rank, bucket.index): digest for bucket, digest in zip(BUCKETS, digests, strict=True)}
        self.hashed: list[tuple[int, int]] = []

    def digest(self, bucket: Bucket) -> int:
        self.hashed.append((bucket.rank, bucket.index))
        return self.digests[bucket.rank, bucket.index]


def test_every_bucket_gets_its_digest_and_other_workers_are_skipped() -> None:
    assert (Expected(BUCKETS[0], 10, DENSE), Expected(BUCKETS[1], 11, UNCHANGED), Expected(BUCKETS[2], 20, DELTA)) == EXPECTED
    assert sent_parameters(EXPECTED) == {"a", "d"}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (PAIRS[:2], r"no digest came for d .*bucket 0 of rank 2"),
        ((replace(PAIRS[0], xxh3=(10,), encodings=(DENSE,)), PAIRS[2]), r"no digest came for b, c on worker 1 \(bucket 1 of rank 0\)"),
        ((*PAIRS, PAIRS[0]), "two digests came for bucket 0 of rank 0"),
        ((*PAIRS, replace(PAIRS[2], rank=5)), "bucket 0 of rank 5 for worker 1, which is not planned"),
    ],
    ids=["pair", "bucket", "twice", "unplanned"],
)
def test_digests_that_do_not_fit_the_buckets_are_refused(pairs: tuple[PairDigests, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        match_digests(1, BUCKETS, pairs)


def test_sent_buckets_are_hashed_and_unchanged_ones_only_if_their_digest_is_not_known() -> None:
    staging = _Staging()
    assert list(verify_buckets(EXPECTED, {}, staging.digest)) == [16, 32, 16]
    assert staging.hashed == [(0, 0), (0, 1), (2, 0)]
    staging = _Staging()
    list(verify_buckets(EXPECTED, {(0, 0): 10, (0, 1): 11, (2, 0): 20}, staging.digest))
    assert staging.hashed == [(0, 0), (2, 0)]
    staging = _Staging()
    list(verify_buckets(EXPECTED, {(0, 1): 5}, staging.digest))
    assert staging.hashed == [(0, 0), (0, 1), (2, 0)]


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        ((0, 11, 20), r"staged bytes of a \[0:4\] on worker 1 \(bucket 0 of rank 0\) differ"),
        ((10, 0, 20), "staged bytes of b, c on worker 1 .*, which were not sent, differ"),
        ((10, 11, 0), "staged bytes of d"),
    ],
)
def test_bytes_that_differ_are_refused_and_named(digests: tuple[int, ...], message: str) -> None:
    with pytest.raises(StateError, match=message):
        list(verify_buckets(EXPECTED, {}, _Staging(digests).digest))


def test_a_long_bucket_is_described_briefly() -> None:
    assert describe_bucket(_bucket(0, 7, *"abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more on worker 1 (bucket 7 of rank 0)"
