"""What an engine worker receives of a push by itself: the collective transport, beside generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.config.models import PushSection
from shoal.errors import TransportError
from shoal.telemetry.logs import get_logger
from shoal.weights.buckets import Bucket
from shoal.weights.transports.base import PieceTarget

if TYPE_CHECKING:
    from shoal.weights.transports.collective_sink import CollectiveReceiver, CollectiveStore

log = get_logger(__name__)

LAST_WORDS_S = 1.0
"""The trainer has its answer before VERIFY, so a receiver that is not done by then never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """How this worker meets the trainer's ranks. ranks: those whose buckets come this way."""

    group: str
    address: str
    timeout_s: float
    ranks: Collection[int]


class WorkerReceiver:
    """The receiver of one worker, and in worker 0 the store that its server's groups are formed in; made when they are first needed.

    Args:
        target: the worker's staging.
    """

    def __init__(self, target: PieceTarget, worker_rank: int) -> None:
        self._target = target
        self._rank = worker_rank
        self._store: CollectiveStore | None = None
        self._receiver: CollectiveReceiver | None = None
        self._is_receiving = False

    def endpoints(self, push: PushSection, host: str, device: str) -> Mapping[str, str]:
        """What to add to the worker's endpoints.

        Args:
            host: where others reach this machine; empty if it is not known yet.
            device: where staging is.
        Raises: TransportError: the store cannot listen there, and the setting leaves no other transport.
        """
        is_wanted = push.transport == "collective" or (push.transport == "auto" and device != "cpu")
        if self._rank != 0 or not host or not is_wanted or push.plaintext_collective is False:
            return {}
        if self._store is None:
            # Processes that never use it should not load it.
            from shoal.weights.transports.collective_sink import CollectiveStore

            try:
                self._store = CollectiveStore(host)
            except TransportError as error:
                if push.transport == "collective":
                    raise
                log.warning("collective_not_offered", error=str(error))
                return {}
        return {"collective": self._store.address}

    def start(self, push_id: str, policy_version: int, buckets: Sequence[Bucket], reception: Reception, device: str) -> None:
        """Begin to receive a push; returns at once."""
        if self._receiver is None:
            from shoal.weights.transports.collective_sink import CollectiveReceiver

            self._receiver = CollectiveReceiver(self._target, self._rank, device)
        by_rank = {rank: [bucket for bucket in buckets if bucket.rank == rank] for rank in reception.ranks}
        self._receiver.start(
            push_id, policy_version, by_rank, group=reception.group, address=reception.address, timeout_s=reception.timeout_s
        )
        self._is_receiving = True

    def finish(self) -> None:
        """See that all is in staging; does nothing if nothing was to be received.

        Raises: TransportError: a rank is gone or sent something wrong. DeadlineError: not everything came.
        """
        if self._receiver is not None and self._is_receiving:
            self._receiver.wait(LAST_WORDS_S)
            self.stop()

    def stop(self) -> None:
        """Receive nothing any more."""
        if self._receiver is not None:
            self._receiver.stop()
        self._is_receiving = False

    def close(self) -> None:
        """Let go of everything."""
        self.stop()
        if self._receiver is not None:
            self._receiver.close()
        if self._store is not None:
            self._store.close()
        self._receiver, self._store = None, None
