"""Shared memory on one host: the engine worker's staging buffer is a file on a tmpfs that both ends map; see `staging_file`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shoal.errors import TransportError
from shoal.types.weights import SinkParameter, SinkWorkerLayout
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.chunks import ChunkCopier
from shoal.weights.transports.pieces import check_pieces, target_pieces, write_delta
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from shoal.weights.transports.staging_file import MappedBytes, OwnedFile, PeerFile, check_same, translate


class ShmLink:
    """`SourceLink` into a mapped file: bytes go straight from the rank's shard to their place, cast on the way."""

    def __init__(self, worker: SinkWorkerLayout, file: PeerFile, copier: ChunkCopier) -> None:
        self._file = file
        self._copier = copier
        self._target = ParameterPieces(worker.parameters, partial(parameter_view, file.buffer), file.path)
        self._sent_bytes = 0

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`."""
        check_pieces(bucket, pieces)
        xxh3 = self._copier.write(target_pieces(self._target, bucket), pieces)
        self._sent_bytes += bucket.num_bytes
        # Checked after the bytes are written: a digest is answered only if they are in the file that the sink reads.
        check_same(self._file.path, self._file.identity)
        return xxh3

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        write_delta(self._target, bucket, delta)
        self._sent_bytes += delta.values.nbytes
        check_same(self._file.path, self._file.identity)

    def finish(self) -> None:
        """See `SourceLink.finish`; what was written is there, if its owner is."""
        self._file.check()

    def close(self) -> None:
        """See `SourceLink.close`; the transport keeps the mapping."""

    @property
    def sent_bytes(self) -> int:
        """Bytes written into the file."""
        return self._sent_bytes


class ShmSourceTransport:
    """`SourceTransport` over mapped files; keeps a mapping from push to push until its path names another file."""

    def __init__(self) -> None:
        self._files: dict[str, PeerFile] = {}
        self._lock = threading.Lock()
        self._copier = ChunkCopier()

    def prepare(self, worker: SinkWorkerLayout) -> None:
        """Map the worker's file, if it is not mapped. Raises: as open."""
        self._map(_path_of(worker), worker.staging_bytes)

    def open(self, request: LinkRequest) -> ShmLink:
        """Reach a worker's staging. Raises: TransportError: it is gone or not the promised file. CapacityError."""
        file = self._map(_path_of(request.worker), request.worker.staging_bytes)
        return ShmLink(request.worker, file, self._copier)

    def close(self) -> None:
        """See `SourceTransport.close`."""
        with self._lock:
            for path in list(self._files):
                self._drop(path)
        self._copier.close()

    @property
    def num_mappings(self) -> int:
        """Staging files mapped now."""
        return len(self._files)

    def _map(self, path: str, num_bytes: int) -> PeerFile:
        with self._lock:
            self._drop_vanished()
            kept = self._files.get(path)
            if kept is None or kept.identity.num_bytes != num_bytes:
                self._drop(path)
                self._files[path] = PeerFile(path, num_bytes)
            return self._files[path]

    def _drop_vanished(self) -> None:
        """Let go of files that nobody owns any more, else a replaced server's memory would stay pinned."""
        for path, file in list(self._files.items()):
            try:
                file.check()
            except TransportError:
                self._drop(path)

    def _drop(self, path: str) -> None:
        kept = self._files.pop(path, None)
        if kept is not None:
            kept.close()


class ShmStaging:
    """`StagingBuffer` over a mapped file that this object owns.

    Args and Raises: see `OwnedFile`.
    """

    def __init__(self, folder: str, name: str, num_bytes: int) -> None:
        self._file = OwnedFile(folder, name, num_bytes)
        self._mapping: MappedBytes | None = None
        try:
            self._mapping = MappedBytes(self._file.descriptor, num_bytes)
        except OSError as error:
            self._file.close()
            raise translate(error, self._file.path, num_bytes) from error

    @property
    def endpoint(self) -> tuple[str, str]:
        """See `StagingBuffer.endpoint`: the file's path."""
        return "shm", self._file.path

    def view(self, parameter: SinkParameter) -> Tensor:
        """See `StagingBuffer.view`. Raises: TransportError: closed, misaligned or outside."""
        if self._mapping is None:
            raise TransportError(f"staging file {self._file.path} is closed; create a new one")
        return parameter_view(self._mapping.buffer, parameter)

    def close(self) -> None:
        """See `StagingBuffer.close`."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
            self._file.close()


def _path_of(worker: SinkWorkerLayout) -> str:
    if "shm" not in worker.endpoints:
        msg = f"worker {worker.worker_rank} offers {', '.join(worker.endpoints) or 'nothing'}, not shm; set push.transport to one of them"
        raise TransportError(msg)
    return worker.endpoints["shm"]
