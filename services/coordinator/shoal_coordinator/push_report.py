"""What became of a weight push, in all and for every server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.weights.stages import PushStage


@dataclass(slots=True, kw_only=True)
class ServerReport:
    """One server's part of a push. The transaction fills it in as it goes on."""

    server_id: str
    dense: bool
    """Everything was asked for, whatever the server's staging held."""
    stage: PushStage = PushStage.PREPARE
    """COMMITTED, or the stage in which it failed or that it had reached when the push ended."""
    error: str | None = None
    """Why it was left out."""
    served_version: int | None = None
    """What it served before, if it said so."""
    transports: tuple[str, ...] = ()
    """Transports of its pairs of trainer rank and engine worker."""
    num_buckets: int = 0
    sent_bytes: int = 0
    """Bytes that crossed the links."""
    dense_bytes: int = 0
    """What they stand for."""
    verify_ms: float = 0.0
    pause_ms: float | None = None
    """How long it did not serve; None unless it committed."""
    num_aborted: int = 0
    """Running requests that COMMIT ended."""

    @property
    def is_committed(self) -> bool:
        """It confirmed the version."""
        return self.stage is PushStage.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """How a push ended."""

    push_id: str
    policy_version: int
    state: PushStage
    """COMMITTED: at least one server serves the version. ABORTED: all serve what they served. FAILED: no server confirmed its COMMIT."""
    stages_s: Mapping[str, float]
    """Seconds in each stage that was entered."""
    servers: Mapping[str, ServerReport]
    """By server id, sorted."""
    error: str | None
    """Why the push was aborted or failed."""
    started_unix_s: float

    @property
    def committed_servers(self) -> tuple[str, ...]:
        """Those that confirmed the version, sorted."""
        return tuple(server_id for server_id, server in self.servers.items() if server.is_committed)

    @property
    def failed_servers(self) -> dict[str, str]:
        """Server to stage and reason; to be fenced."""
        return {server_id: f"{server.stage}: {server.error}" for server_id, server in self.servers.items() if server.error is not None}

    @property
    def pause_ms(self) -> dict[str, float]:
        """How long each committed server did not serve."""
        return {server_id: server.pause_ms for server_id, server in self.servers.items() if server.pause_ms is not None}

    @property
    def max_pause_ms(self) -> float:
        """The longest of them; 0 if no server committed."""
        return max(self.pause_ms.values(), default=0.0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that crossed the links to all servers."""
        return sum(server.sent_bytes for server in self.servers.values())

    @property
    def dense_bytes(self) -> int:
        """What they stand for."""
        return sum(server.dense_bytes for server in self.servers.values())

    @property
    def delta_share(self) -> float:
        """What was sent as a share of what it stands for; 1 if everything was sent, or nothing was asked for."""
        return share_of(self.sent_bytes, self.dense_bytes)

    @property
    def num_aborted(self) -> int:
        """Running requests that COMMIT ended."""
        return sum(server.num_aborted for server in self.servers.values())

    @property
    def total_s(self) -> float:
        """Seconds from the first stage to the last."""
        return sum(self.stages_s.values())


def share_of(sent_bytes: int, dense_bytes: int) -> float:
    """sent / dense; 1 where there is nothing."""
    return sent_bytes / dense_bytes if dense_bytes else 1.0
