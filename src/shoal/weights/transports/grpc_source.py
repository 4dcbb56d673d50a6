"""The trainer's end of the grpc transport: buckets as messages of at most 1 MiB, over several streams for each rank and worker.

A bucket goes over one stream whole; the next goes over the next stream. Between packing and a stream is a bounded queue; those of a server
together hold one bucket, or two messages each if that is more. A slow sink stops the packing. gRPC does not survive fork: a process that
has used this starts children with spawn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import grpc
import torch
import xxhash
from torch import Tensor

from shoal.codec.bucket_stream import MAX_PART_BYTES, BucketPart, StreamHead
from shoal.config.models import PushSection, SecuritySection
from shoal.errors import CapacityError, DeadlineError, ShoalError, TransportError, UnavailableError
from shoal.rpc.allocator import keep_freed_memory
from shoal.rpc.catalogue import from_rpc_error
from shoal.rpc.channel import open_thread_channel
from shoal.types.weights import BucketEncoding, SinkWorkerLayout
from shoal.weights.buckets import Bucket
from shoal.weights.delta import encode_delta
from shoal.weights.transports.base import Delta, LinkRequest
from shoal.weights.transports.grpc_stream import PartStream
from shoal.weights.transports.packing import host_pieces, packed_parts

_MIN_QUEUED = 2


class GrpcSourceTransport:
    """Opens links over channels that it keeps from push to push. Safe to use from several threads.

    Args:
        push: `grpc_streams` and `bucket_bytes`.
        security: the same as of every other channel of the process.
    """

    def __init__(self, push: PushSection, security: SecuritySection) -> None:
        keep_freed_memory()
        self._push = push
        self._security = security
        self._lock = threading.Lock()
        self._channels: dict[str, list[grpc.Channel]] = {}
        self._push_id = ""
        self._used: set[str] = set()

    def prepare(self, worker: SinkWorkerLayout) -> None:
        """Open the channels. Raises: as open."""
        self._channels_to(worker)

    def open(self, request: LinkRequest) -> GrpcSourceLink:
        """See `SourceTransport.open`; a server that does not answer is noticed with the first bucket.

        Raises: TransportError: the worker offers no grpc. ConfigError: its address is no host:port, or a PEM file cannot be read.
        """
        self._drop_unused(request.push_id)
        channels = self._channels_to(request.worker)
        return GrpcSourceLink(request, channels, self._push.bucket_bytes, partial(self._drop, channels))

    def close(self) -> None:
        """See `SourceTransport.close`."""
        with self._lock:
            for channels in self._channels.values():
                _close_all(channels)
            self._channels.clear()

    @property
    def num_channels(self) -> int:
        """Channels open now."""
        return sum(map(len, self._channels.values()))

    def _channels_to(self, worker: SinkWorkerLayout) -> list[grpc.Channel]:
        address = _address_of(worker)
        with self._lock:
            self._used.add(address)
            if address not in self._channels:
                self._channels[address] = [open_thread_channel(address, self._security) for _ in range(self._push.grpc_streams)]
            return self._channels[address]

    def _drop_unused(self, push_id: str) -> None:
        """Close the channels that neither the push before nor this one's PREPARE used, else those of replaced servers would pile up."""
        with self._lock:
            if push_id == self._push_id:
                return
            for address in self._channels.keys() - self._used:
                _close_all(self._channels.pop(address))
            self._push_id, self._used = push_id, set()

    def _drop(self, channels: list[grpc.Channel]) -> None:
        """Forget channels that failed: new ones connect at once, where these would wait before they try again."""
        with self._lock:
            for address in [address for address, kept in self._channels.items() if kept is channels]:
                del self._channels[address]
        _close_all(channels)


class GrpcSourceLink:
    """`SourceLink` over streams that are opened when they are first needed."""

    def __init__(
        self, request: LinkRequest, channels: Sequence[grpc.Channel], bucket_bytes: int, on_disconnect: Callable[[], None]
    ) -> None:
        self._head = StreamHead(
            push_id=request.push_id, policy_version=request.policy_version, rank=request.rank, worker_rank=request.worker.worker_rank
        )
        self._channels = channels
        self._peer = f"worker {request.worker.worker_rank} of server {request.server_id} at {_address_of(request.worker)}"
        self._deadline_s = time.monotonic() + request.timeout_s
        self._max_queued = max(_MIN_QUEUED, bucket_bytes // MAX_PART_BYTES // (len(channels) * request.num_workers))
        self._on_disconnect = on_disconnect
        self._buffer = torch.empty(MAX_PART_BYTES, dtype=torch.uint8)
        self._streams: list[PartStream] = []
        self._num_buckets = 0
        self._sent_bytes = 0

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`."""
        digest = xxhash.xxh3_64()
        parts = packed_parts(bucket, host_pieces(bucket, pieces), self._buffer, digest)
        self._send(bucket, BucketEncoding.DENSE, bucket.num_bytes, parts)
        return digest.intdigest()

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        data = memoryview(encode_delta(delta))
        parts = (data[start : start + MAX_PART_BYTES] for start in range(0, len(data), MAX_PART_BYTES))
        self._send(bucket, BucketEncoding.DELTA, len(data), parts)

    def finish(self) -> None:
        """See `SourceLink.finish`."""
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            self._guard(stream.wait_written)
        # Whatever follows goes over new ones.
        self._streams = []
        self._num_buckets = 0

    def close(self) -> None:
        """See `SourceLink.close`."""
        for stream in self._streams:
            stream.cancel()

    @property
    def sent_bytes(self) -> int:
        """See `SourceLink.sent_bytes`."""
        return self._sent_bytes

    def _send(self, bucket: Bucket, encoding: BucketEncoding, encoded_bytes: int, parts: Iterator[memoryview]) -> None:
        stream = self._next_stream()
        offset = 0
        for data in parts:
            part = BucketPart(
                bucket=bucket.index,
                encoding=encoding,
                offset_bytes=offset,
                encoded_bytes=encoded_bytes,
                data=data,
            )
            self._guard(partial(stream.send, part))
            offset += data.nbytes
        stream.end_bucket()
        self._sent_bytes += offset

    def _next_stream(self) -> PartStream:
        index = self._num_buckets % len(self._channels)
        self._num_buckets += 1
        if index == len(self._streams):
            timeout_s = max(self._deadline_s - time.monotonic(), 0.0)
            self._streams.append(PartStream(self._channels[index], self._head, max_queued=self._max_queued, timeout_s=timeout_s))
        return self._streams[index]

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step of a stream; a failure ends all streams and becomes an error that a link may raise."""
        try:
            step()
        except grpc.RpcError as error:
            # Every error that a call of a channel raises is the call itself.
            failure = from_rpc_error(cast(grpc.Call, error), peer=self._peer)
        except ShoalError as error:
            failure = error
        else:
            return
        self.close()
        if isinstance(failure, UnavailableError | DeadlineError):
            self._on_disconnect()
        raise _as_link_error(failure)


def _as_link_error(error: ShoalError) -> ShoalError:
    return error if isinstance(error, CapacityError | DeadlineError | TransportError) else TransportError(str(error))


def _address_of(worker: SinkWorkerLayout) -> str:
    if "grpc" not in worker.endpoints:
        msg = f"worker {worker.worker_rank} offers {', '.join(worker.endpoints) or 'nothing'}, not grpc; set push.transport to one of them"
        raise TransportError(msg)
    return worker.endpoints["grpc"]


def _close_all(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()
