"""What an audit found: do the servers compute with the trainer's weights?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAgreement:
    """Greedy responses of a server, scored by the trainer.

    max_logprob_difference is in nats, 0 without tokens, inf if a log-probability is not finite.
    """

    num_tokens: int
    max_logprob_difference: float
    num_equal_greedy: int

    @property
    def greedy_share(self) -> float:
        """Share of tokens that both would choose; 1 without tokens."""
        return self.num_equal_greedy / self.num_tokens if self.num_tokens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAudit:
    """One server against the trainer. error: why its weights could not be compared; probe_error: why no probe was."""

    server_id: str
    num_parameters: int = 0
    num_pieces: int = 0
    num_differing: int = 0
    first_difference: str | None = None
    error: str | None = None
    probe: ProbeAgreement | None = None
    probe_error: str | None = None

    @property
    def differs(self) -> bool:
        """At least one piece differs."""
        return self.num_differing > 0

    @property
    def result(self) -> str:
        """equal, differs or unknown."""
        if self.error is not None:
            return "unknown"
        return "differs" if self.differs else "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """One audit of all ready servers."""

    policy_version: int
    servers: Mapping[str, ServerAudit]
    started_unix_s: float
    duration_s: float

    @property
    def result(self) -> str:
        """differs if a server does, else unknown if one could not be compared, else equal."""
        results = {server.result for server in self.servers.values()}
        return next((result for result in ("differs", "unknown") if result in results), "equal")
