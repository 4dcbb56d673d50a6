"""A process group of two, a trainer rank and an engine worker, and what they say to each other.

    rank    HELLO(push, version)  BUCKET(index, encoding, bytes) payload  BUCKET ... payload  FLUSH                        END
    worker                                                                                           WRITTEN(buckets, bytes)

Each pair has a group of its own, beside the default group and every other: a pair waits for nobody but its peer, whatever the order in
which a rank goes through workers or a worker hears its ranks, and one that fails takes no other with it. torch itself gives point-to-point
calls over NCCL a communicator per pair. Names in the store are `<collective_group>/<rank>/<worker_rank>/`. Nothing is encrypted and
nobody authenticates: it is for a network that only the run can reach; elsewhere use the grpc transport.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from shoal.errors import ConfigError, DeadlineError, TransportError

WORKER, RANK = 0, 1
"""Members of a group."""

_HEADER_ITEMS = 4
_POLL_S = 0.002
_MEET_POLL_S = 0.01
_GLOO_TIMEOUTS = 5
"""Gloo waits for so many of its timeouts, one after another, for a peer that has said where it is and then went away."""
# The watchdog of an NCCL group ends the process; the limits here are the callers' own.
_NEVER = timedelta(days=365)
_environment = threading.Lock()


class Kind(IntEnum):
    """What a header announces."""

    HELLO = 1
    BUCKET = 2
    FLUSH = 3
    WRITTEN = 4
    END = 5


@dataclass(frozen=True, slots=True)
class Header:
    """Sent before and between payloads: a kind and three numbers that depend on it."""

    kind: Kind
    first: int = 0
    second: int = 0
    third: int = 0

    def to_tensor(self) -> Tensor:
        """[4] int64."""
        return torch.tensor([self.kind, self.first, self.second, self.third], dtype=torch.int64)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Header:
        """Raises: TransportError: no header."""
        numbers: list[int] = tensor.tolist()
        if numbers[0] not in list(Kind):
            raise TransportError(f"the peer sent {numbers} where a header belongs; are both ends of the same version?")
        return cls(Kind(numbers[0]), *numbers[1:])


def hello(push_id: str, policy_version: int) -> Header:
    """How a rank begins a push; the id travels as a digest, since headers have a fixed size."""
    return Header(Kind.HELLO, xxhash.xxh3_64_intdigest(push_id.encode()) >> 1, policy_version)


def connect_store(address: str, deadline_s: float) -> Store:
    """Reach the store that a server's groups meet in.

    Args:
        address: host:port.
        deadline_s: of `time.monotonic`.
    Raises: TransportError: nobody listens there. DeadlineError.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"the store's address {address!r} is not host:port; it comes from the server's layout")
    with _translated(f"the store at {address}", deadline_s):
        _knock(host.strip("[]"), int(port), deadline_s)
        return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=_left(deadline_s), multi_tenant=False)


class PairGroup:
    """One member's end of a group of two.

    Args:
        store: shared by both.
        name: `<collective_group>/<rank>/<worker_rank>`.
        member: WORKER or RANK.
        device: where payloads are: "cpu" (gloo) or "cuda:<index>" (nccl).
        address: of the store; gloo listens on the interface that leads there.
        deadline_s: until when the peer has to join.
    Raises: TransportError: it cannot be formed. DeadlineError: the peer did not join.
    """

    def __init__(self, store: Store, name: str, member: int, *, device: str, address: str, deadline_s: float) -> None:
        self._name = name
        self._peer = RANK if member == WORKER else WORKER
        self._device = torch.device(device)
        prefixed = PrefixStore(name, store)
        with _translated(name, deadline_s):
            _meet(prefixed, member, self._peer, deadline_s)
            make = _nccl_group if self._device.type == "cuda" else _gloo_group
            self._group: Any = make(prefixed, member, address, _left(deadline_s))

    @property
    def device(self) -> torch.device:
        """Where payloads must be."""
        return self._device

    def send(self, tensor: Tensor, deadline_s: float) -> None:
        """Send a tensor; it may be used again afterwards. Raises: TransportError: the peer is gone. DeadlineError."""
        self._run("send", tensor, deadline_s)

    def receive(self, tensor: Tensor, deadline_s: float) -> None:
        """Fill a tensor with what the peer sends. Raises: as `send`."""
        self._run("recv", tensor, deadline_s)

    def send_header(self, header: Header, deadline_s: float) -> None:
        """Raises: as `send`."""
        self.send(header.to_tensor().to(self._device), deadline_s)

    def receive_header(self, deadline_s: float) -> Header:
        """Raises: as `send`; TransportError: something else came."""
        tensor = torch.empty(_HEADER_ITEMS, dtype=torch.int64, device=self._device)
        self.receive(tensor, deadline_s)
        return Header.from_tensor(tensor.cpu())

    def close(self) -> None:
        """Leave; the peer's calls fail at once."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()

    def _run(self, call: str, tensor: Tensor, deadline_s: float) -> None:
        work = None
        try:
            with _translated(self._name, deadline_s):
                if self._group is None:
                    raise TransportError(f"the group {self._name} is closed; push again")
                work = getattr(self._group, call)([tensor], self._peer, 0)
                if self._device.type == "cuda":
                    self._poll(work, deadline_s)
                # Gloo gives up a pair that was waited for in vain, so this waits once, for all that is left.
                work.wait(_left(deadline_s))
        finally:
            # An error's traceback would keep it, and it the connection, whose end is what tells the peer.
            del work

    def _poll(self, work: Any, deadline_s: float) -> None:  # noqa: ANN401 - torch's stubs lack its errors
        """On a GPU `wait` only orders streams: whether bytes have moved is asked for."""
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                self.close()
                raise DeadlineError(f"{self._name}: the peer did not answer in time; is it stopped?")
            time.sleep(_POLL_S)


def _meet(store: Store, member: int, peer: int, deadline_s: float) -> None:
    """Wait until the peer is here too. It is asked for again and again: waiting would lock a connection that other threads use."""
    store.set(f"here/{member}", "")
    while not store.check([f"here/{peer}"]):
        if time.monotonic() > deadline_s:
            raise DeadlineError("the peer did not join in time; is it stopped?")
        time.sleep(_MEET_POLL_S)


def _gloo_group(store: Store, member: int, address: str, timeout: timedelta) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs name it otherwise
    # Without a device gloo resolves the host's name, which need not lead anywhere.
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address))]
    options._timeout = timeout / _GLOO_TIMEOUTS
    options._threads = 1
    return ProcessGroupGloo(store, member, 2, options)


def _nccl_group(store: Store, member: int, address: str, timeout: timedelta) -> object:
    # Absent from builds without CUDA.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    with _environment:
        # Read when a group is made: by default a peer's death ends this process, and with it a rollout server.
        before = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        try:
            return ProcessGroupNCCL(store, member, 2, options)
        finally:
            del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
            if before is not None:
                os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = before


def _own_address(address: str) -> str:
    """This host's address on the way to the store. Connecting a datagram socket sends nothing."""
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _knock(host: str, port: int, deadline_s: float) -> None:
    """Refuse a store that nobody serves: torch would try again until the deadline."""
    socket.create_connection((host, port), timeout=_left(deadline_s).total_seconds()).close()


def _left(deadline_s: float) -> timedelta:
    # Zero would mean for ever.
    return timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))


@contextmanager
def _translated(what: str, deadline_s: float) -> Iterator[None]:
    """torch reports everything as RuntimeError; whether time was up tells the two kinds apart."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if time.monotonic() >= deadline_s - 0.01:
            raise DeadlineError(f"{what}: the peer did not answer in time; is it stopped?") from error
        raise TransportError(f"{what}: the peer is gone, or cannot be reached: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
