"""Staging files: what is written, what is refused, and that nothing is left or grows."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.config.models import PushSection
from shoal.errors import CapacityError, TransportError
from shoal.types.weights import Box, SinkParameter, SinkWorkerLayout
from shoal.weights import boxes
from shoal.weights.digest import CHUNK_BYTES
from shoal.weights.transports.base import SinkTransport, SourceTransport
from shoal.weights.transports.factory import open_sink_transport, open_source_transport
from shoal.weights.transports.shm import ShmSinkTransport, ShmSourceTransport
from tests.helpers.layouts import box, columns_of, rows_of, staged

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 8), "vector": (5,), "scalar": (), "cube": (2, 3, 4)}


def layout_of(sink: SinkTransport, parameters: tuple[SinkParameter, ...], staging_bytes: int) -> SinkWorkerLayout:
    return SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=(), staging_path=sink.address, staging_bytes=staging_bytes)


class Pair:
    """One sink and one source over the same staging file."""

    def __init__(self, folder: Path, dtype: str = "float32", shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        parameters, self.staging_bytes = staged(shapes, dtype)
        self.parameters = {parameter.name: parameter for parameter in parameters}
        push = PushSection(shm_dir=str(folder))
        self.sink: SinkTransport = open_sink_transport(push, "run-0", self.staging_bytes)
        self.source: SourceTransport = open_source_transport(push)
        self.layout = layout_of(self.sink, parameters, self.staging_bytes)

    def staged(self, name: str) -> torch.Tensor:
        return self.sink.tensor(self.parameters[name])

    def close(self) -> None:
        self.source.close()
        self.sink.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("matrix", rows_of((6, 8), 2, 5)),
        ("matrix", columns_of((6, 8), 3, 7)),
        ("vector", box((1, 4))),
        ("scalar", Box(offsets=(), sizes=())),
        ("cube", box((0, 2), (1, 3), (2, 4))),
        ("matrix", box((2, 2), (0, 8))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_fills_the_box_and_nothing_else(tmp_path: Path, name: str, where: Box, dtype: str) -> None:
    pair = Pair(tmp_path, dtype)
    source = torch.randn(where.sizes) * 100
    xxh3 = pair.source.open(pair.layout).write(name, where, source)
    expected = torch.zeros(SHAPES[name], dtype=getattr(torch, dtype))
    expected[tuple(slice(offset, offset + size) for offset, size in zip(where.offsets, where.sizes, strict=True))] = source.to(
        expected.dtype
    )
    assert torch.equal(pair.staged(name), expected)
    assert all(not pair.staged(other).any() for other in SHAPES if other != name)
    assert xxh3 == pair.sink.digest(pair.parameters[name], where)
    pair.close()


def test_write_takes_strided_sources(pair: Pair) -> None:
    source = torch.randn(8, 6).T
    pair.source.open(pair.layout).write("matrix", boxes.whole((6, 8)), source)
    assert torch.equal(pair.staged("matrix"), source)


def test_write_of_many_chunks_equals_one_copy(tmp_path: Path) -> None:
    rows = 3 * CHUNK_BYTES // (2 * 640) + 7
    pair = Pair(tmp_path, "bfloat16", {"wide": (rows, 1000)})
    source = torch.randn(rows, 640)
    where = columns_of((rows, 1000), 100, 740)
    xxh3 = pair.source.open(pair.layout).write("wide", where, source)
    assert torch.equal(pair.staged("wide")[:, 100:740], source.to(torch.bfloat16))
    assert xxh3 == pair.sink.digest(pair.parameters["wide"], where)
    pair.close()


def test_digest_notices_one_changed_byte(pair: Pair) -> None:
    where = boxes.whole((6, 8))
    xxh3 = pair.source.open(pair.layout).write("matrix", where, torch.randn(6, 8))
    pair.staged("matrix").view(torch.uint8)[3, 3] ^= 1
    assert pair.sink.digest(pair.parameters["matrix"], where) != xxh3


def test_write_refuses_unknown_parameters_boxes_and_shapes(pair: Pair) -> None:
    writer = pair.source.open(pair.layout)
    with pytest.raises(TransportError, match="no parameter nobody"):
        writer.write("nobody", boxes.whole((1,)), torch.zeros(1))
    with pytest.raises(TransportError, match=r"vector.*outside"):
        writer.write("vector", box((2, 6)), torch.zeros(4))
    with pytest.raises(TransportError, match=r"vector wants \[2\].*has \[1\]"):
        writer.write("vector", box((2, 4)), torch.zeros(1))
    assert not any(pair.staged(name).any() for name in SHAPES)


def test_view_refuses_misaligned_and_outlying_parameters(pair: Pair) -> None:
    parameter = pair.parameters["vector"]
    for offset in (2, pair.staging_bytes - 4, -4):
        with pytest.raises(TransportError, match="vector is staged at bytes"):
            pair.sink.tensor(replace(parameter, staging_offset_bytes=offset))


def test_source_keeps_its_mapping_between_pushes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ShmSourceTransport()
    before = num_mappings_of(pair.sink.address)
    num_made = 0

    def counted(file_descriptor: int, length: int) -> mmap.mmap:
        nonlocal num_made
        num_made += 1
        return original(file_descriptor, length)

    original = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", counted)
    for _ in range(3):
        source.open(pair.layout).write("vector", boxes.whole((5,)), torch.ones(5))
    assert num_made == 1
    assert num_mappings_of(pair.sink.address) == before + 1
    source.close()
    assert num_mappings_of(pair.sink.address) == before
    assert Path(pair.sink.address).exists()


def test_source_follows_a_replaced_file(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.source.open(pair.layout).write("vector", boxes.whole((5,)), torch.ones(5))
    pair.sink.close()
    pair.sink = ShmSinkTransport(str(tmp_path), "run-0", pair.staging_bytes)
    assert not pair.staged("vector").any()
    pair.source.open(pair.layout).write("vector", boxes.whole((5,)), torch.full((5,), 2.0))
    assert torch.equal(pair.staged("vector"), torch.full((5,), 2.0))
    pair.close()


def test_source_lets_go_of_a_dead_sink_when_it_opens_another(tmp_path: Path) -> None:
    dead = Pair(tmp_path)
    source = ShmSourceTransport()
    source.open(dead.layout)
    dead.close()
    parameters, staging_bytes = staged(SHAPES)
    sink = ShmSinkTransport(str(tmp_path), "run-1", staging_bytes)
    source.open(layout_of(sink, parameters, staging_bytes))
    assert source.num_mappings == 1
    source.close()
    sink.close()


def test_write_fails_when_the_staging_file_went_or_was_replaced(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    writer = pair.source.open(pair.layout)
    pair.sink.close()
    with pytest.raises(TransportError, match="is the engine worker alive"):
        writer.write("vector", boxes.whole((5,)), torch.ones(5))
    pair.sink = ShmSinkTransport(str(tmp_path), "run-0", pair.staging_bytes)
    with pytest.raises(TransportError, match="no longer the file"):
        writer.write("vector", boxes.whole((5,)), torch.ones(5))
    assert not pair.staged("vector").any()
    pair.close()


def test_open_refuses_what_is_not_the_promised_file(tmp_path: Path, pair: Pair) -> None:
    link = tmp_path / "link"
    link.symlink_to(pair.sink.address)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (link, "cannot be opened"),
        (tmp_path / "absent", "cannot be opened"),
        (pipe, "regular file"),
        (tmp_path, "opened"),
    ):
        with pytest.raises(TransportError, match=words):
            pair.source.open(replace(pair.layout, staging_path=str(path)))
    with pytest.raises(TransportError, match=f"has {pair.staging_bytes} bytes"):
        pair.source.open(replace(pair.layout, staging_bytes=pair.staging_bytes + 1))


def test_open_refuses_a_truncated_file_that_it_had_mapped(pair: Pair) -> None:
    pair.source.open(pair.layout)
    os.truncate(pair.sink.address, 1)
    with pytest.raises(TransportError, match="has 1 bytes"):
        pair.source.open(pair.layout)
    os.truncate(pair.sink.address, pair.staging_bytes)


def test_open_reserves_memory_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 20)
    parameters, _ = staged({"p": (4,)})
    layout = SinkWorkerLayout(worker_rank=0, parameters=parameters, regions=(), staging_path=str(path), staging_bytes=1 << 20)
    ShmSourceTransport().open(layout)
    assert path.stat().st_blocks * 512 >= 1 << 20


def test_no_space_is_a_capacity_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"no space for 4096 bytes.*push\.shm_dir"):
        ShmSinkTransport(str(tmp_path), "run-0", 4096)
    assert list(tmp_path.iterdir()) == []


def test_sink_refuses_an_existing_file_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "shoal-run-0").write_bytes(b"kept")
    with pytest.raises(TransportError, match="shoal-run-0"):
        ShmSinkTransport(str(tmp_path), "run-0", 4096)
    assert (tmp_path / "shoal-run-0").read_bytes() == b"kept"


def test_sink_closes_once_and_only_its_own_file(tmp_path: Path) -> None:
    sink = ShmSinkTransport(str(tmp_path), "run-0", 4096)
    sink.close()
    successor = ShmSinkTransport(str(tmp_path), "run-0", 4096)
    sink.close()
    assert Path(successor.address).exists()
    successor.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransportError, match="closed"):
        sink.tensor(SinkParameter(name="p", shape=(1,), dtype="float32", staging_offset_bytes=0))


def test_200_pushes_leave_no_growth(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    where = boxes.whole((6, 8))
    after_10 = (0, 0)
    for number in range(200):
        writer = pair.source.open(pair.layout)
        assert writer.write("matrix", where, torch.full((6, 8), float(number))) == pair.sink.digest(pair.parameters["matrix"], where)
        if number == 10:
            after_10 = open_files_and_mappings()
    assert open_files_and_mappings() == after_10
    assert len(list(tmp_path.iterdir())) == 1
    pair.close()
    assert list(tmp_path.iterdir()) == []


def test_200_restarted_sinks_leave_no_growth(tmp_path: Path) -> None:
    source = ShmSourceTransport()
    parameters, staging_bytes = staged(SHAPES)
    after_10 = (0, 0)
    for number in range(200):
        sink = ShmSinkTransport(str(tmp_path), f"run-{number}", staging_bytes)
        source.open(layout_of(sink, parameters, staging_bytes)).write("vector", boxes.whole((5,)), torch.ones(5))
        sink.close()
        if number == 10:
            after_10 = open_files_and_mappings()
    assert open_files_and_mappings() == after_10
    assert source.num_mappings == 1
    source.close()
    assert list(tmp_path.iterdir()) == []


def num_mappings_of(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path)


def open_files_and_mappings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/shoal-run-")


def test_readers_never_remove_the_file(tmp_path: Path) -> None:
    """The fault of `multiprocessing.shared_memory`: a process that attached and exited took the segment along."""
    pair = Pair(tmp_path)
    pair.staged("vector").fill_(7)
    script = (
        "import sys, mmap\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0)\n"
        "    sys.exit(mapped[0] not in range(256))\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script, pair.sink.address], check=True, timeout=30)
    assert Path(pair.sink.address).stat().st_nlink == 1
    assert torch.equal(pair.staged("vector"), torch.full((5,), 7.0))
    pair.close()
