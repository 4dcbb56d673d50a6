"""Device memory on one host: the engine worker's staging buffer is a tensor that the trainer's ranks map and copy into.

Lifetime. torch counts the receivers of a shared storage and keeps its memory for as long as the count is positive, so that a receiver
which was killed would pin it for ever. The worker takes its own count back as soon as the handle is made: the memory is then the worker's
alone and goes when the worker closes it. A rank that maps it still keeps only the driver's mapping, and drops that the next time it opens
a link. Whether the worker lives is told by a locked file of one byte, see `staging_file`. A rank copies on its current stream of the
worker's device and waits for it once, in `finish`; the worker reads only after that. The handle is plain bytes, no object crosses.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.errors import CapacityError, TransportError
from shoal.types.weights import SinkParameter, SinkWorkerLayout
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.chunks import copy_elements
from shoal.weights.transports.pieces import check_pieces, digest_of, target_pieces, write_delta
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from shoal.weights.transports.staging_file import Identity, OwnedFile, check_owned


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """What a rank needs to map a worker's buffer. Byte strings are base64; `lock_file` tells whether the worker lives.

    gpu_uuid names the GPU, since two processes may number their GPUs differently.
    """

    gpu_uuid: str
    memory: str
    num_bytes: int
    offset_bytes: int
    counter: str
    counter_offset: int
    event: str
    event_sync: bool
    lock_file: str
    lock_device: int
    lock_inode: int

    def to_endpoint(self) -> str:
        """The handle as an address."""
        return base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_endpoint(cls, endpoint: str) -> DeviceHandle:
        """Read an address. Raises: TransportError: it is no handle."""
        try:
            fields = json.loads(base64.b64decode(endpoint, validate=True))
            handle = cls(**fields)
        except (binascii.Error, ValueError, TypeError) as error:
            raise TransportError(f"not a cuda_ipc address: {error}; both ends need the same version") from error
        for name, expected in cls.__annotations__.items():
            if type(getattr(handle, name)).__name__ != expected:
                raise TransportError(f"{name} of a cuda_ipc address is no {expected}; both ends need the same version")
        return handle

    @property
    def lock_identity(self) -> Identity:
        """What the worker's lock file must still be."""
        return Identity(self.lock_device, self.lock_inode, 1)


class CudaStaging:
    """`StagingBuffer` in device memory.

    Args:
        folder: for the lock file; a tmpfs that both ends see.
        name: unique, see `OwnedFile`.
        num_bytes: size of the buffer, at least 1.
        device: "cuda" or "cuda:<index>".
    Raises: CapacityError: no device memory, or no space for the lock file. TransportError: the lock file exists.
    """

    def __init__(self, folder: str, name: str, num_bytes: int, device: str) -> None:
        self._lock_file = OwnedFile(folder, name, 1)
        self._buffer: Tensor | None = None
        try:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            # The zeros are there before anyone else may write.
            torch.cuda.synchronize(self._buffer.device)
            self._endpoint = self._share(self._buffer).to_endpoint()
        except torch.cuda.OutOfMemoryError as error:
            msg = f"no {num_bytes} bytes of staging on {device}: {error}; leave the engine less memory or stage in host memory"
            raise CapacityError(f"{msg} (push.transport shm or grpc)") from error
        finally:
            if not hasattr(self, "_endpoint"):
                self.close()

    @property
    def endpoint(self) -> tuple[str, str]:
        """See `StagingBuffer.endpoint`."""
        return "cuda_ipc", self._endpoint

    def view(self, parameter: SinkParameter) -> Tensor:
        """See `StagingBuffer.view`. Raises: TransportError: closed, misaligned or outside."""
        if self._buffer is None:
            raise TransportError("the device staging buffer is closed; create a new one")
        return parameter_view(self._buffer, parameter)

    def close(self) -> None:
        """See `StagingBuffer.close`; the lock goes first, so that no rank takes what is freed for a worker's."""
        self._lock_file.close()
        self._buffer = None

    def _share(self, buffer: Tensor) -> DeviceHandle:
        storage = buffer.untyped_storage()
        _, memory, num_bytes, offset_bytes, counter, counter_offset, event, event_sync = storage._share_cuda_()  # type: ignore[no-untyped-call]
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        lock = self._lock_file.identity
        return DeviceHandle(
            gpu_uuid=str(torch.cuda.get_device_properties(buffer.device).uuid),
            memory=_text(memory),
            num_bytes=num_bytes,
            offset_bytes=offset_bytes,
            counter=_text(counter),
            counter_offset=counter_offset,
            event=_text(event),
            event_sync=event_sync,
            lock_file=self._lock_file.path,
            lock_device=lock.device,
            lock_inode=lock.inode,
        )


class CudaIpcLink:
    """`SourceLink` into another process's device memory."""

    def __init__(self, worker: SinkWorkerLayout, buffer: Tensor, handle: DeviceHandle) -> None:
        self._buffer = buffer
        self._handle = handle
        self._target = ParameterPieces(worker.parameters, partial(parameter_view, buffer), handle.lock_file)
        self._sent_bytes = 0

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`; the digest is taken of the pieces, on the host, while the device copies."""
        check_pieces(bucket, pieces)
        for target, piece in zip(target_pieces(self._target, bucket), pieces, strict=True):
            copy_elements(target, piece.detach())
        self._sent_bytes += bucket.num_bytes
        return digest_of(pieces, bucket.dtype)

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        write_delta(self._target, bucket, delta)
        self._sent_bytes += delta.positions.nbytes + delta.values.nbytes

    def finish(self) -> None:
        """See `SourceLink.finish`."""
        torch.cuda.synchronize(self._buffer.device)
        check_owned(self._handle.lock_file, self._handle.lock_identity)

    def close(self) -> None:
        """See `SourceLink.close`; copies that are under way end first, since the worker may reuse the memory."""
        torch.cuda.synchronize(self._buffer.device)

    @property
    def sent_bytes(self) -> int:
        """Bytes written into the worker's device memory."""
        return self._sent_bytes


class CudaIpcSourceTransport:
    """The trainer's end; keeps a mapping from push to push until its worker is gone."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[DeviceHandle, Tensor]] = {}
        self._lock = threading.Lock()

    def prepare(self, worker: SinkWorkerLayout) -> None:
        """Map the worker's memory, if it is not mapped. Raises: as open."""
        self._map(worker)

    def open(self, request: LinkRequest) -> CudaIpcLink:
        """Reach a worker's staging. Raises: TransportError: it is gone, another size, or its GPU is not visible here."""
        handle, buffer = self._map(request.worker)
        return CudaIpcLink(request.worker, buffer, handle)

    def close(self) -> None:
        """See `SourceTransport.close`."""
        with self._lock:
            self._buffers.clear()

    def _map(self, worker: SinkWorkerLayout) -> tuple[DeviceHandle, Tensor]:
        endpoint = worker.endpoints.get("cuda_ipc")
        if endpoint is None:
            offered = ", ".join(worker.endpoints) or "nothing"
            raise TransportError(f"worker {worker.worker_rank} offers {offered}, not cuda_ipc; set push.transport to what it offers")
        with self._lock:
            self._drop_vanished()
            if endpoint not in self._buffers:
                handle = DeviceHandle.from_endpoint(endpoint)
                check_owned(handle.lock_file, handle.lock_identity)
                self._buffers[endpoint] = handle, _open(handle)
            handle, buffer = self._buffers[endpoint]
        if buffer.numel() != worker.staging_bytes:
            msg = f"device staging of worker {worker.worker_rank} has {buffer.numel()} bytes, it promised {worker.staging_bytes}"
            raise TransportError(f"{msg}; prepare the push again")
        return handle, buffer

    def _drop_vanished(self) -> None:
        """Let go of the memory of workers that are gone, else the driver would keep it."""
        for endpoint, (handle, _) in list(self._buffers.items()):
            try:
                check_owned(handle.lock_file, handle.lock_identity)
            except TransportError:
                del self._buffers[endpoint]


def _open(handle: DeviceHandle) -> Tensor:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        _local_index(handle.gpu_uuid),
        _bytes(handle.memory),
        handle.num_bytes,
        handle.offset_bytes,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _local_index(gpu_uuid: str) -> int:
    """This process's number of a GPU."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu_uuid:
            return index
    msg = f"GPU {gpu_uuid} of an engine worker is not visible to this rank; let CUDA_VISIBLE_DEVICES name it"
    raise TransportError(f"{msg} or set push.transport to shm or grpc")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise TransportError(f"not a cuda_ipc address: {error}; both ends need the same version") from error
