"""Staging files: who may remove them, who notices what, that no access can kill a process, and that nothing is left or grows."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.config.models import PushSection, SecuritySection
from shoal.errors import CapacityError, TransportError
from shoal.types.weights import SinkParameter, SinkWorkerLayout
from shoal.weights import boxes
from shoal.weights.buckets import Bucket
from shoal.weights.transports.base import LinkRequest, SourceLink
from shoal.weights.transports.factory import open_source_transport, open_staging
from shoal.weights.transports.pieces import bucket_digest
from shoal.weights.transports.shm import ShmSourceTransport, ShmStaging
from shoal.weights.transports.staging import ParameterPieces
from shoal.weights.transports.staging_file import PeerFile
from tests.helpers.layouts import sink_worker, staged
from tests.helpers.transport_pieces import bucket_of, write_and_exit

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (6, 8), "vector": (5,)}
VECTOR = bucket_of([("vector", boxes.whole((5,)))], "float32")
MATRIX = bucket_of([("matrix", boxes.whole((6, 8)))], "float32")


def layout_of(staging: ShmStaging) -> SinkWorkerLayout:
    parameters, num_bytes = staged(SHAPES)
    return sink_worker(0, parameters, (), num_bytes, dict([staging.endpoint]))


def request_of(worker: SinkWorkerLayout) -> LinkRequest:
    return LinkRequest(
        push_id="push",
        policy_version=1,
        rank=0,
        world_size=1,
        server_id="server",
        worker=worker,
        num_workers=1,
        collective_group="",
        timeout_s=5.0,
    )


class Pair:
    """One sink and one source over the same staging file."""

    def __init__(self, folder: Path, name: str = "run-0") -> None:
        self.parameters, self.num_bytes = staged(SHAPES)
        self.sink = ShmStaging(str(folder), name, self.num_bytes)
        self.source = ShmSourceTransport()
        self.layout = layout_of(self.sink)
        self.path = self.sink.endpoint[1]

    def open(self) -> SourceLink:
        return self.source.open(request_of(self.layout))

    def write(self, value: float, bucket: Bucket = VECTOR) -> int:
        link = self.open()
        digest = link.write_dense(bucket, [torch.full(piece.parameter_box.sizes, float(value)) for piece in bucket.pieces])
        link.finish()
        link.close()
        return digest

    def staged(self, name: str) -> torch.Tensor:
        return self.sink.view(next(one for one in self.parameters if one.name == name))

    def close(self) -> None:
        self.source.close()
        self.sink.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_source_keeps_its_mapping_between_pushes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mappings_of(pair.path)
    num_made = 0

    class Counted(mmap.mmap):
        def __new__(cls, file_descriptor: int, length: int) -> Counted:
            nonlocal num_made
            num_made += 1
            return super().__new__(cls, file_descriptor, length)

    monkeypatch.setattr(mmap, "mmap", Counted)
    pair.source.prepare(pair.layout)
    for value in range(3):
        pair.write(value)
    assert num_made == 1
    assert num_mappings_of(pair.path) == before + 1
    pair.source.close()
    assert num_mappings_of(pair.path) == before
    assert Path(pair.path).exists()


def test_source_follows_a_replaced_file(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write(1.0)
    pair.sink.close()
    pair.sink = ShmStaging(str(tmp_path), "run-0", pair.num_bytes)
    assert not pair.staged("vector").any()
    pair.write(2.0)
    assert torch.equal(pair.staged("vector"), torch.full((5,), 2.0))
    pair.close()


def test_source_lets_go_of_a_dead_sink_when_it_opens_another(tmp_path: Path) -> None:
    dead = Pair(tmp_path)
    dead.open()
    dead.sink.close()
    other = ShmStaging(str(tmp_path), "run-1", dead.num_bytes)
    dead.source.open(request_of(layout_of(other)))
    assert dead.source.num_mappings == 1
    dead.source.close()
    other.close()


def test_link_stays_usable_while_another_thread_lets_go_of_its_file(tmp_path: Path) -> None:
    """A link whose file vanished must fail with an error, not touch memory that is no longer mapped."""
    pair = Pair(tmp_path)
    link = pair.open()
    pair.sink.close()
    other = ShmStaging(str(tmp_path), "run-1", pair.num_bytes)
    pair.source.open(request_of(layout_of(other)))
    with pytest.raises(TransportError, match="is the engine worker alive"):
        link.write_dense(VECTOR, [torch.ones(5)])
    pair.source.close()
    other.close()


def test_write_fails_when_the_staging_file_went_or_was_replaced(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    link = pair.open()
    pair.sink.close()
    for write in (lambda: link.write_dense(VECTOR, [torch.ones(5)]), link.finish):
        with pytest.raises(TransportError, match="is the engine worker alive"):
            write()
    pair.sink = ShmStaging(str(tmp_path), "run-0", pair.num_bytes)
    for write in (lambda: link.write_dense(VECTOR, [torch.ones(5)]), link.finish):
        with pytest.raises(TransportError, match="no longer the file"):
            write()
    assert not pair.staged("vector").any()
    pair.close()


def test_finish_and_open_fail_when_nobody_owns_the_file(pair: Pair, tmp_path: Path) -> None:
    """What a killed worker leaves behind: the file, without its lock."""
    left = tmp_path / "shoal-left"
    left.write_bytes(bytes(pair.num_bytes))
    layout = replace(pair.layout, endpoints={"shm": str(left)})
    with left.open("rb+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        link = pair.source.open(request_of(layout))
        link.write_dense(VECTOR, [torch.ones(5)])
        link.finish()
    with pytest.raises(TransportError, match=r"nobody holds .*shoal-left"):
        link.finish()
    with pytest.raises(TransportError, match="nobody holds"):
        pair.source.open(request_of(layout))
    assert left.exists()


def test_open_refuses_what_is_not_the_promised_file(tmp_path: Path, pair: Pair) -> None:
    link = tmp_path / "link"
    link.symlink_to(pair.path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in (
        (link, "cannot be opened"),
        (tmp_path / "absent", "cannot be opened"),
        (pipe, "regular file"),
        (tmp_path, "opened"),
    ):
        with pytest.raises(TransportError, match=words):
            pair.source.open(request_of(replace(pair.layout, endpoints={"shm": str(path)})))
    with pytest.raises(TransportError, match=f"has {pair.num_bytes} bytes"):
        pair.source.open(request_of(replace(pair.layout, staging_bytes=pair.num_bytes + 1)))
    with pytest.raises(TransportError, match="offers grpc, not shm"):
        pair.source.open(request_of(replace(pair.layout, endpoints={"grpc": "nowhere:1"})))


def test_open_refuses_a_truncated_file_that_it_had_mapped(pair: Pair) -> None:
    pair.open()
    os.truncate(pair.path, 1)
    with pytest.raises(TransportError, match="has 1 bytes"):
        pair.open()
    os.truncate(pair.path, pair.num_bytes)


def test_open_reserves_memory_that_the_file_lacks(tmp_path: Path) -> None:
    """A page that a full tmpfs cannot give would kill whoever touches it."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 20)
    with path.open("rb+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        peer = PeerFile(str(path), 1 << 20)
        assert path.stat().st_blocks * 512 >= 1 << 20
        peer.close()


def full(_descriptor: int, _offset: int, _length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_is_a_capacity_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"no space for 4096 bytes.*push\.shm_dir"):
        open_staging(PushSection(shm_dir=str(tmp_path)), "run-0", 4096, "cpu")
    assert list(tmp_path.iterdir()) == []


def test_no_space_at_the_source_is_a_capacity_error_and_leaves_the_sink_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match=f"no space for {pair.num_bytes} bytes"):
            pair.open()
    assert pair.source.num_mappings == 0
    pair.write(3.0)
    assert torch.equal(pair.staged("vector"), torch.full((5,), 3.0))


def test_staging_that_cannot_be_mapped_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _length: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match="no space for 4096 bytes"):
        ShmStaging(str(tmp_path), "run-0", 4096)
    assert list(tmp_path.iterdir()) == []


def test_sink_refuses_an_existing_file_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "shoal-run-0").write_bytes(b"kept")
    with pytest.raises(TransportError, match="shoal-run-0"):
        ShmStaging(str(tmp_path), "run-0", 4096)
    assert (tmp_path / "shoal-run-0").read_bytes() == b"kept"


def test_sink_closes_once_and_only_its_own_file(tmp_path: Path) -> None:
    sink = ShmStaging(str(tmp_path), "run-0", 4096)
    sink.close()
    successor = ShmStaging(str(tmp_path), "run-0", 4096)
    sink.close()
    assert Path(successor.endpoint[1]).exists()
    successor.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransportError, match="closed"):
        sink.view(SinkParameter(name="p", shape=(1,), dtype="float32", staging_offset_bytes=0))


def test_bytes_stay_mapped_for_whoever_still_writes_when_a_file_is_let_go(tmp_path: Path) -> None:
    """Another thread lets go of a server's file while one writes to it: an access to what is no longer mapped kills the process."""
    pair = Pair(tmp_path)
    link, view = pair.open(), pair.staged("matrix")
    pair.close()
    # Counted before they are touched, so that this fails without a crash.
    assert num_mappings_of(pair.path) == 2
    view.fill_(1.0)
    with pytest.raises(TransportError, match="is the engine worker alive"):
        link.write_dense(MATRIX, [torch.ones(6, 8)])
    del link, view
    gc.collect()
    assert num_mappings_of(pair.path) == 0


def test_view_refuses_misaligned_and_outlying_parameters(pair: Pair) -> None:
    parameter = pair.parameters[1]
    for offset in (2, pair.num_bytes - 4, -4):
        with pytest.raises(TransportError, match="vector is staged at bytes"):
            pair.sink.view(replace(parameter, staging_offset_bytes=offset))


def test_digest_notices_one_changed_byte(pair: Pair) -> None:
    digest = pair.write(1.5, MATRIX)
    target = ParameterPieces(pair.parameters, pair.sink.view, "test")
    assert bucket_digest(target, MATRIX) == digest
    pair.staged("matrix").view(torch.uint8)[3, 3] ^= 1
    assert bucket_digest(target, MATRIX) != digest


def test_200_restarted_sinks_leave_no_growth(tmp_path: Path) -> None:
    source = ShmSourceTransport()
    _, num_bytes = staged(SHAPES)
    after_10 = (0, 0)
    for number in range(200):
        sink = ShmStaging(str(tmp_path), f"run-{number}", num_bytes)
        link = source.open(request_of(layout_of(sink)))
        link.write_dense(VECTOR, [torch.ones(5)])
        link.close()
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
        subprocess.run([sys.executable, "-c", script, pair.path], check=True, timeout=30)
    assert Path(pair.path).stat().st_nlink == 1
    assert torch.equal(pair.staged("vector"), torch.full((5,), 7.0))
    pair.close()


def test_source_that_exits_leaves_the_file_and_its_bytes(pair: Pair) -> None:
    rank = multiprocessing.get_context("spawn").Process(target=write_and_exit, args=(request_of(pair.layout), VECTOR, 4.0))
    rank.start()
    rank.join(60)
    assert rank.exitcode == 0
    assert Path(pair.path).exists()
    assert torch.equal(pair.staged("vector"), torch.full((5,), 4.0))
    pair.write(5.0)
    assert torch.equal(pair.staged("vector"), torch.full((5,), 5.0))


def test_factory_refuses_a_transport_that_there_is_not(pair: Pair) -> None:
    source = open_source_transport(PushSection(), SecuritySection())
    with pytest.raises(TransportError, match=r"there is no transport 'pigeon'.*shm, grpc, collective, cuda_ipc"):
        source.open(request_of(pair.layout), "pigeon")
    source.close()


FULL_TMPFS = """
import sys
from shoal.errors import CapacityError
from shoal.weights.transports.shm import ShmStaging
from shoal.weights.transports.staging_file import PeerFile, OwnedFile
import os

folder = sys.argv[1]
try:
    ShmStaging(folder, "large", 4 << 20)
except CapacityError as error:
    assert "no space for 4194304 bytes" in str(error)
else:
    sys.exit("staging was given memory that there is not")
assert os.listdir(folder) == []
owner = OwnedFile(folder, "sparse", 1)
os.ftruncate(owner.descriptor, 4 << 20)
try:
    PeerFile(owner.path, 4 << 20)
except CapacityError:
    print("alive")
"""


def test_full_tmpfs_is_an_error_at_both_ends_and_kills_nobody(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1M none {tmp_path} && exec "$@"'
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs of its own")
    done = subprocess.run(
        [*alone, sys.executable, "-c", FULL_TMPFS, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "alive", done.stderr
