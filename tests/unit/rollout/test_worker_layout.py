"""Layouts, buckets and digests cross to the workers as plain data and come back the same."""

from __future__ import annotations

import msgspec
from shoal_rollout.worker_layout import (
    ALIGNMENT_BYTES,
    buckets_from_plain,
    buckets_to_plain,
    layout_from_plain,
    layout_to_plain,
    pairs_from_plain,
    pairs_to_plain,
    pieces_from_plain,
    pieces_to_plain,
    place_parameters,
)

from shoal.types import Box, SinkRegion, SinkWorkerLayout
from shoal.types.weights import BucketEncoding, PairDigests, PieceDigests, Place
from shoal.weights.buckets import Bucket, Piece

BOX = Box(offsets=(0, 2), sizes=(3, 4))
SCALAR = Box(offsets=(), sizes=())


def test_parameters_are_placed_at_cache_lines_without_overlap() -> None:
    placed, total = place_parameters([("a", (3, 5), "float32"), ("b", (7,), "bfloat16"), ("c", (0, 4), "float32"), ("d", (16,), "float32")])
    offsets = [parameter.staging_offset_bytes for parameter in placed]
    assert offsets == [0, 64, 128, 128]
    assert total == 192
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert place_parameters([])[1] == ALIGNMENT_BYTES


def test_layouts_survive_the_message_format() -> None:
    parameters, num_bytes = place_parameters([("p", (3, 6), "float32"), ("s", (), "float32")])
    regions = (
        SinkRegion(parameter="p", source_name="w", source_box=BOX, parameter_box=BOX),
        SinkRegion(parameter="s", source_name="v", source_box=SCALAR, parameter_box=SCALAR),
    )
    layout = SinkWorkerLayout(
        worker_rank=1,
        parameters=parameters,
        regions=regions,
        staging_bytes=num_bytes,
        place=Place(host_id="boot:1:2", device="cpu"),
        endpoints={"shm": "/x", "collective": "host:1"},
    )
    assert layout_from_plain(_through_msgpack(layout_to_plain(layout))) == layout


def test_buckets_survive_the_message_format() -> None:
    pieces = tuple(
        Piece(parameter=name, source_name="w", source_box=box, parameter_box=box) for name, box in (("p", BOX), ("s", SCALAR), ("p", BOX))
    )
    buckets = (
        Bucket(rank=3, worker_rank=1, index=0, dtype="bfloat16", pieces=pieces, num_bytes=50),
        Bucket(rank=3, worker_rank=1, index=1, dtype="float32", pieces=pieces[:1], num_bytes=48),
    )
    assert buckets_from_plain(_through_msgpack(buckets_to_plain(buckets))) == buckets


def test_digests_survive_the_message_format() -> None:
    pairs = [
        PairDigests(rank=2, worker_rank=1, xxh3=(2**64 - 1, 0, 7), encodings=tuple(BucketEncoding)),
        PairDigests(rank=3, worker_rank=1, xxh3=(), encodings=()),
    ]
    pieces = [PieceDigests(rank=2, worker_rank=1, xxh3=(2**64 - 1, 0))]
    assert pairs_from_plain(_through_msgpack(pairs_to_plain(pairs))) == pairs
    assert pieces_from_plain(_through_msgpack(pieces_to_plain(pieces))) == pieces


def _through_msgpack(value: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
