"""Pairs of a sender and a receiver for the push benchmark's baselines: a bare gRPC stream, a safetensors file."""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

State = Mapping[str, Tensor]
Work = Callable[[], None]

CHUNK_BYTES = 1 << 20
_CALL_TIMEOUT_S = 300.0
_SEED = 11


class Method(Protocol):
    """One way from a sender's tensors to a receiver's; the peers talk over a pipe."""

    def sender(self, state: State, peer: Connection) -> contextlib.AbstractContextManager[Work]:
        """Set up; the result sends everything once."""
        ...

    def receiver(self, state: State, peer: Connection) -> contextlib.AbstractContextManager[Work]:
        """Set up; the result returns when everything has arrived in the state."""
        ...


def open_method(name: str, folder: str) -> Method:
    """A method of METHODS. Raises: KeyError: there is none of this name."""
    return METHODS[name](Path(folder))


def fill(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, Tensor]:
    """Random finite values, the same in every process; drawn as bits, which is fast."""
    generator = np.random.default_rng(_SEED)
    kind = getattr(torch, dtype)
    limit, bits = (0x3F800000, np.int32) if kind.itemsize == 4 else (0x3F80, np.int16)
    return {
        name: torch.from_numpy(generator.integers(0, limit, math.prod(shape), dtype=bits)).view(kind).view(shape)
        for name, shape in shapes.items()
    }


def raw_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 view of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


class GrpcStream:
    """Client streaming of raw messages; the receiver copies each to its place in the event loop of its server."""

    def __init__(self, folder: Path) -> None:
        pass

    @contextlib.contextmanager
    def sender(self, state: State, peer: Connection) -> Iterator[Work]:
        """See `Method.sender`."""
        import grpc

        sources = [raw_bytes(tensor).numpy().data for tensor in state.values()]

        def chunks() -> Iterator[bytes]:
            for source in sources:
                for start in range(0, len(source), CHUNK_BYTES):
                    yield bytes(source[start : start + CHUNK_BYTES])

        with grpc.insecure_channel(peer.recv()) as channel:
            call: Any = channel.stream_unary("/bench.Push/Write", request_serializer=None, response_deserializer=None)
            yield lambda: call(chunks(), timeout=_CALL_TIMEOUT_S) and None

    @contextlib.contextmanager
    def receiver(self, state: State, peer: Connection) -> Iterator[Work]:
        """See `Method.receiver`."""
        import grpc

        targets = [raw_bytes(tensor).numpy() for tensor in state.values()]
        arrived: queue.Queue[None] = queue.Queue(maxsize=1)

        def write(messages: Iterator[bytes], _context: Any) -> bytes:  # noqa: ANN401 - grpc is untyped here
            index = offset = 0
            for message in messages:
                targets[index][offset : offset + len(message)] = np.frombuffer(message, np.uint8)
                offset += len(message)
                if offset == len(targets[index]):
                    index, offset = index + 1, 0
            arrived.put(None)
            return b"done"

        server = grpc.server(ThreadPoolExecutor(1))
        handler: Any = grpc.stream_unary_rpc_method_handler(write)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Push", {"Write": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        peer.send(f"127.0.0.1:{port}")
        yield lambda: arrived.get(timeout=_CALL_TIMEOUT_S)
        server.stop(None)


class Safetensors:
    """A file on disk, as far as the page cache; not synced."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "baseline.safetensors"

    @contextlib.contextmanager
    def sender(self, state: State, peer: Connection) -> Iterator[Work]:
        """See `Method.sender`."""
        from safetensors.torch import save_file

        def send() -> None:
            save_file(dict(state), self._path)
            peer.send("written")

        try:
            yield send
        finally:
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def receiver(self, state: State, peer: Connection) -> Iterator[Work]:
        """See `Method.receiver`."""
        from safetensors.torch import load_file

        def receive() -> None:
            peer.recv()
            loaded = load_file(self._path)
            for name, tensor in state.items():
                tensor.copy_(loaded[name])

        yield receive


METHODS: dict[str, Callable[[Path], Method]] = {"grpc_stream": GrpcStream, "safetensors": Safetensors}
