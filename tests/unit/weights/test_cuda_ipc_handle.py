"""What of the cuda_ipc transport needs no GPU: its address, and what it refuses before it touches a device."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.errors import TransportError
from shoal.weights.transports.cuda_ipc import CudaIpcSourceTransport, DeviceHandle
from shoal.weights.transports.staging_file import OwnedFile
from tests.helpers.layouts import sink_worker

HANDLE = DeviceHandle(
    gpu_uuid="GPU-0",
    memory=base64.b64encode(bytes(range(64))).decode(),
    num_bytes=4096,
    offset_bytes=512,
    counter=base64.b64encode(b"/torch_1_2_3").decode(),
    counter_offset=7,
    event="",
    event_sync=False,
    lock_file="/nowhere",
    lock_device=1,
    lock_inode=2,
)


def test_handle_survives_its_address() -> None:
    assert DeviceHandle.from_endpoint(HANDLE.to_endpoint()) == HANDLE


def address_of(fields: object) -> str:
    return base64.b64encode(json.dumps(fields).encode()).decode()


@pytest.mark.parametrize(
    "address",
    [
        "no base64!",
        base64.b64encode(b"\x80\x04N.").decode(),
        address_of([1, 2]),
        address_of({}),
        address_of(asdict(HANDLE) | {"more": 1}),
        address_of(asdict(HANDLE) | {"num_bytes": "4096"}),
        address_of(asdict(HANDLE) | {"counter_offset": True}),
        address_of(asdict(HANDLE) | {"memory": 5}),
    ],
)
def test_address_that_is_no_handle_is_refused(address: str) -> None:
    with pytest.raises(TransportError, match="cuda_ipc address"):
        DeviceHandle.from_endpoint(address)


def test_worker_without_a_handle_is_refused() -> None:
    with pytest.raises(TransportError, match="offers shm, not cuda_ipc"):
        CudaIpcSourceTransport().prepare(sink_worker(0, (), (), 4096))


def test_worker_that_was_killed_is_refused_before_its_memory_is_mapped(tmp_path: Path) -> None:
    lock = OwnedFile(str(tmp_path), "run-0", 1)
    identity = lock.identity
    handle = replace(HANDLE, lock_file=lock.path, lock_device=identity.device, lock_inode=identity.inode)
    lock.close()
    for words, path in (("is the engine worker alive", lock.path), ("nobody holds", str(tmp_path / "shoal-left"))):
        (tmp_path / "shoal-left").write_bytes(b"\0")
        worker = sink_worker(0, (), (), 4096, {"cuda_ipc": replace(handle, lock_file=path).to_endpoint()})
        with pytest.raises(TransportError, match=words):
            CudaIpcSourceTransport().prepare(worker)


def test_gpu_that_this_process_does_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = OwnedFile(str(tmp_path), "run-0", 1)
    identity = lock.identity
    handle = replace(HANDLE, lock_file=lock.path, lock_device=identity.device, lock_inode=identity.inode)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(TransportError, match=r"GPU GPU-0 .* CUDA_VISIBLE_DEVICES"):
        CudaIpcSourceTransport().prepare(sink_worker(0, (), (), 4096, {"cuda_ipc": handle.to_endpoint()}))
    lock.close()
