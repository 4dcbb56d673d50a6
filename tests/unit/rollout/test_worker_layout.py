"""Layouts and digests cross to the workers as plain data and come back the same."""

from __future__ import annotations

import msgspec
from shoal_rollout.worker_layout import (
    ALIGNMENT_BYTES,
    digests_from_plain,
    digests_to_plain,
    layout_from_plain,
    layout_to_plain,
    place_parameters,
)

from shoal.types import Box, CopyDigest, SinkRegion, SinkWorkerLayout


def test_parameters_are_placed_at_cache_lines_without_overlap() -> None:
    placed, total = place_parameters([("a", (3, 5), "float32"), ("b", (7,), "bfloat16"), ("c", (0, 4), "float32"), ("d", (16,), "float32")])
    offsets = [parameter.staging_offset_bytes for parameter in placed]
    assert offsets == [0, 64, 128, 128]
    assert total == 192
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    assert place_parameters([])[1] == ALIGNMENT_BYTES


def test_layout_and_digests_survive_the_message_format() -> None:
    box = Box(offsets=(0, 2), sizes=(3, 4))
    parameters, num_bytes = place_parameters([("p", (3, 6), "float32")])
    regions = (SinkRegion(parameter="p", source_name="w", source_box=box, parameter_box=box),)
    layout = SinkWorkerLayout(worker_rank=1, parameters=parameters, regions=regions, staging_path="/x", staging_bytes=num_bytes)
    digests = [CopyDigest(worker_rank=1, parameter="p", parameter_box=box, xxh3=2**64 - 1)]
    assert layout_from_plain(_through_msgpack(layout_to_plain(layout))) == layout
    assert digests_from_plain(_through_msgpack(digests_to_plain(digests))) == digests


def _through_msgpack(value: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
