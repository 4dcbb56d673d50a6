"""Commands and answers between rank 0 and the other ranks, as bytes in a TCPStore that rank 0 hosts.

    command/<n>            name, newline, payload
    answer/<n>/<rank>      one rank's outcome

A store is used rather than a collective: a follower may wait for hours between commands, which no collective timeout allows. When rank 0
dies its store dies too, and every waiting follower notices at once. Rank 0 deletes the keys of a command once all answers are in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from shoal.errors import UnavailableError
from shoal_trainer.distributed import RankContext

FOLLOWER_WAIT_S = 60.0
"""A follower's single wait for a command; it then waits again."""

ANSWER_WAIT_S = 0.25
"""Rank 0's single wait for answers; it then looks which ranks have failed."""

_CONNECT_TIMEOUT = timedelta(seconds=60)


class CommandStore:
    """One rank's end of the store. Not for use from several threads at the same time."""

    def __init__(self, store: Store, world_size: int) -> None:
        # torch's stub knows no bytes, which the store takes and gives.
        self._store: Any = store
        self._world_size = world_size

    def publish(self, number: int, command: str, payload: bytes) -> None:
        """Give a command to all followers."""
        self._store.set(_command_key(number), command.encode() + b"\n" + payload)

    def next_command(self, number: int) -> tuple[str, bytes]:
        """Wait for a command, without end but in bounded steps.

        Raises: UnavailableError: rank 0 is gone.
        """
        while True:
            try:
                self._store.wait([_command_key(number)], timedelta(seconds=FOLLOWER_WAIT_S))
                command, _, payload = self._store.get(_command_key(number)).partition(b"\n")
                return command.decode(), payload
            except dist.DistStoreError:
                continue
            except dist.DistNetworkError as error:
                raise UnavailableError("rank 0 of the gang is gone") from error

    def answer(self, number: int, rank: int, outcome: bytes) -> None:
        """Give this rank's outcome of a command to rank 0.

        Raises: UnavailableError: rank 0 is gone.
        """
        try:
            self._store.set(_answer_key(number, rank), outcome)
        except dist.DistNetworkError as error:
            raise UnavailableError("rank 0 of the gang is gone") from error

    def answers(self, number: int) -> Iterator[dict[int, bytes]]:
        """Yield the answers of followers that have come in so far, at least every ANSWER_WAIT_S, until all are there."""
        found: dict[int, bytes] = {}
        while len(found) < self._world_size - 1:
            missing = [rank for rank in range(1, self._world_size) if rank not in found]
            self._wait_a_moment([_answer_key(number, rank) for rank in missing])
            for rank in missing:
                if self._store.check([_answer_key(number, rank)]):
                    found[rank] = self._store.get(_answer_key(number, rank))
            yield dict(found)

    def forget(self, number: int) -> None:
        """Delete a command and its answers."""
        for key in (_command_key(number), *(_answer_key(number, rank) for rank in range(1, self._world_size))):
            self._store.delete_key(key)

    def _wait_a_moment(self, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=ANSWER_WAIT_S))
        except dist.DistStoreError:
            return


def open_command_store(context: RankContext, host: str) -> CommandStore | None:
    """Open the store on rank 0 and connect the others; None for a gang of one.

    Args:
        host: address of rank 0's machine.
    Raises: UnavailableError: a follower cannot connect.
    """
    if context.world_size == 1:
        return None
    store: Store | None = None
    port = torch.zeros(1, dtype=torch.int64, device=context.device)
    if context.rank == 0:
        hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
        store, port[0] = hosted, hosted.port
    dist.broadcast(port, src=0)
    if store is None:
        store = _connect(host, int(port.item()))
    return CommandStore(store, context.world_size)


def _connect(host: str, port: int) -> Store:
    deadline = time.monotonic() + _CONNECT_TIMEOUT.total_seconds()
    while True:
        try:
            return TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT)
        except dist.DistNetworkError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(f"rank 0's command store at {host}:{port} cannot be reached") from error


def _command_key(number: int) -> str:
    return f"command/{number}"


def _answer_key(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"
