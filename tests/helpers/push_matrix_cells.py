"""The cells of the failure matrix: who suffers what in which stage, and what must become of the push."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from tests.helpers.push_matrix_cluster import SERVERS, Cluster
from tests.helpers.push_matrix_faults import Fault

STAGES = ("prepare", "transfer", "verify", "commit")


class Served(StrEnum):
    """What a server must serve once the push is over."""

    OLD = "old"
    NEW = "new"
    NOTHING = "nothing"
    LATER = "stopped"
    WRONG = "wrong weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault of one process in one stage.

    at: where the fault strikes, process and stage. kind: "kill", "stop", or the name of a corruption.
    meaning: the corruption in words. victim_server, other_server: what rollout-0 and rollout-1 must serve after the push.
    audited: the corruption is found by the audit after the push, not by the push. doubted: rollout-0 serves the new version, but the
    coordinator cannot know.
    """

    victim: str
    stage: str
    kind: str
    at: str
    victim_server: Served
    other_server: Served
    meaning: str = ""
    audited: bool = False
    doubted: bool = False
    slow: bool = False
    transport: str = "shm"

    @property
    def fault(self) -> str:
        """The column of the matrix."""
        return self.kind if self.kind in SIGNALS else "wrong digest"

    @property
    def name(self) -> str:
        """For pytest."""
        wire = "" if self.transport == "shm" else f"-{self.transport}"
        return f"{self.victim}-{self.stage}-{self.kind}{wire}".replace(" ", "_")

    @property
    def committed(self) -> list[str]:
        """The servers that the push must report as committed; the others are fenced."""
        served = zip(SERVERS, (self.victim_server, self.other_server), strict=True)
        return [server for server, what in served if what in (NEW, WRONG) and not (self.doubted and server == SERVERS[0])]

    def armed(self, cluster: Cluster) -> Fault:
        """The fault for this cluster's processes."""
        if self.kind not in SIGNALS:
            return Fault(at=self.at, kind=self.kind)
        return Fault(at=self.at, kind="signal", process_id=cluster.pid_of(PROCESS_OF[self.victim]), signal_number=SIGNALS[self.kind])


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PROCESS_OF = {
    "trainer rank": "rank-1",
    "gang leader": "rank-0",
    "engine worker": "worker-0",
    "rollout server": "rollout-0",
    "coordinator": "coordinator",
}

# Where the victim itself is in each stage; a process that has no part in a stage is hit by one that has, as the stage begins.
STRIKES_AT = {
    "trainer rank": ("rank-1:prepare", "rank-1:transfer", "rollout-0:verify", "rollout-0:commit"),
    "gang leader": ("leader:prepare", "rank-0:transfer", "rollout-0:verify", "rollout-0:commit"),
    "engine worker": ("worker-0:prepare", "rank-0:transfer", "worker-0:verify", "worker-0:commit"),
    "rollout server": ("rollout-0:prepare", "rank-0:transfer", "rollout-0:verify", "rollout-0:commit"),
    "coordinator": ("coordinator:prepare", "coordinator:transfer", "coordinator:verify", "coordinator:committed"),
}

OLD, NEW, NOTHING, LATER, WRONG = Served.OLD, Served.NEW, Served.NOTHING, Served.LATER, Served.WRONG


def _served(victim: str, stage: str, kind: str) -> tuple[Served, Served]:
    """What rollout-0 and rollout-1 serve after a kill or stop."""
    if victim in ("trainer rank", "gang leader"):
        return (OLD, OLD) if stage in ("prepare", "transfer") else (NEW, NEW)
    if victim == "coordinator":
        return (NEW, OLD) if stage == "commit" else (OLD, OLD)
    return (NOTHING if kind == "kill" else LATER), NEW


def _signal_cell(victim: str, stage: str, kind: str, *, slow: bool = False, transport: str = "shm") -> Cell:
    victim_server, other_server = _served(victim, stage, kind)
    return Cell(
        victim=victim,
        stage=stage,
        kind=kind,
        at=STRIKES_AT[victim][STAGES.index(stage)],
        victim_server=victim_server,
        other_server=other_server,
        slow=slow,
        transport=transport,
    )


def _corruption(
    victim: str,
    stage: str,
    at: str,
    kind: str,
    served: tuple[Served, Served],
    meaning: str,
    *,
    audited: bool = False,
    doubted: bool = False,
) -> Cell:
    victim_server, other_server = served
    return Cell(
        victim=victim,
        stage=stage,
        kind=kind,
        at=at,
        victim_server=victim_server,
        other_server=other_server,
        meaning=meaning,
        audited=audited,
        doubted=doubted,
    )


CORRUPTIONS = [
    _corruption("trainer rank", "prepare", "rank-1:prepare", "wrong plan hash", (OLD, OLD), "it plans something else than the others"),
    _corruption("trainer rank", "transfer", "rank-1:transfer", "wrong digest", (OLD, NEW), "a digest of a bucket that it sent is wrong"),
    _corruption("trainer rank", "verify", "rank-1:transfer", "late write", (OLD, NEW), "it writes into staging again after TRANSFER"),
    _corruption(
        "trainer rank", "commit", "rank-1:digest", "wrong digest", (NEW, NEW), "it names a wrong digest in the audit", audited=True
    ),
    _corruption("gang leader", "prepare", "leader:prepare", "wrong plan hash", (OLD, NEW), "the plan's hash is changed on its way"),
    _corruption("gang leader", "transfer", "leader:transfer", "missing digest", (OLD, NEW), "a digest is lost on its way"),
    _corruption("gang leader", "verify", "leader:transfer", "swapped digests", (OLD, NEW), "two digests change places on their way"),
    _corruption(
        "gang leader", "commit", "leader:digest", "wrong digest", (NEW, NEW), "an audit's digest is changed on its way", audited=True
    ),
    _corruption("engine worker", "prepare", "worker-0:prepare", "impossible layout", (OLD, NEW), "its layout lies outside its parameters"),
    _corruption("engine worker", "transfer", "worker-0:verify", "flipped byte", (OLD, NEW), "a staged byte flips after it was written"),
    _corruption("engine worker", "verify", "worker-0:verify", "wrong digest", (OLD, NEW), "it compares with a wrong digest"),
    _corruption("engine worker", "commit", "worker-0:commit", "half swap", (NOTHING, NEW), "the swap fails half way"),
    _corruption("rollout server", "prepare", "rollout-0:plan", "other plan", (OLD, NEW), "it plans something else than the others"),
    _corruption("rollout server", "transfer", "rollout-0:plan", "early drop", (OLD, NEW), "it drops the push while it is written"),
    _corruption("rollout server", "verify", "rollout-0:verify", "changed digest", (OLD, NEW), "a digest is changed on its way"),
    _corruption(
        "rollout server", "commit", "rollout-0:commit", "other version", (NEW, NEW), "it says that it serves another version", doubted=True
    ),
    _corruption("coordinator", "prepare", "coordinator:prepare", "wrong plan hash", (OLD, NEW), "it asks a server for another plan"),
    _corruption(
        "coordinator", "transfer", "coordinator:transfer", "other push", (OLD, OLD), "it asks the gang for a push that was not prepared"
    ),
    _corruption("coordinator", "verify", "coordinator:verify", "changed digest", (OLD, NEW), "it hands a server a changed digest"),
    _corruption("coordinator", "commit", "coordinator:commit", "other version", (OLD, NEW), "it commits a version that was not staged"),
]

QUICK_STOPS = {"trainer rank": "prepare", "gang leader": "transfer", "engine worker": "verify", "rollout server": "commit"}
"""Every victim but the coordinator once, each in another stage. A stop lasts until a deadline, that of a coordinator until the servers give
its push up, which takes the sum of all deadlines."""

CELLS = [
    *(
        _signal_cell(victim, stage, kind, slow=kind == "stop" and QUICK_STOPS.get(victim) != stage)
        for victim in PROCESS_OF
        for stage in STAGES
        for kind in SIGNALS
    ),
    *CORRUPTIONS,
]

AUDIT_CELLS = [
    _corruption("engine worker", "commit", "worker-0:commit", "wrong tensor", (WRONG, NEW), "it swaps a wrong tensor in", audited=True)
]
"""Beside the matrix: only an audit can find this one."""

WIRE_CELLS = [
    *(
        _signal_cell(victim, "transfer", kind, transport=transport, slow=True)
        for transport in ("grpc", "collective")
        for victim in PROCESS_OF
        for kind in SIGNALS
        if victim != "coordinator"
    ),
    *(
        _signal_cell(victim, "commit", kind, transport="grpc", slow=True)
        for victim in ("engine worker", "rollout server", "coordinator")
        for kind in SIGNALS
    ),
]
"""Beside the matrix, which is played over shared memory and with one COMMIT for all: servers and workers that take part in TRANSFER, and,
in the cluster of the grpc transport, one COMMIT after the other."""

COMMIT_OF = {"shm": "barrier", "grpc": "rolling", "collective": "barrier"}
"""How the cluster of a transport commits."""
