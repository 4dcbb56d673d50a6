"""The trainer's end of a weight push on one rank: what it holds, what it sends where, and the sending.

Each rank runs the same commands as its gang, in its own process, with no collective in between: `describe` names the local shards,
`prepare` plans against the servers and keeps this rank's parts, `transfer` sends them. Only local tensors are touched, so a rank never
holds more of the model than its shard, a copy of it in the serving dtype where deltas are sent, and a bucket per server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.config.models import PushSection
from shoal.errors import ShoalError, StateError, TransportError
from shoal.telemetry.logs import get_logger
from shoal.types.weights import (
    PieceDigests,
    Place,
    PlannedServer,
    ServerTransfer,
    SinkLayout,
    SinkTarget,
    SourceLayout,
    SourceTransferred,
    StagedVersion,
)
from shoal.weights.buckets import Bucket
from shoal.weights.dtypes import item_bytes
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_push
from shoal.weights.transports.base import SourceTransport
from shoal.weights.transports.pieces import canonical_digest, torch_dtype
from shoal_trainer.shadow import Shadow
from shoal_trainer.source_layout import ComputedTensor, HeldTensors
from shoal_trainer.transfer import STUCK_GRACE_S, Encoder, PairPart, PushTo, ServerPart, failed, send_to_all

log = get_logger(__name__)

MAX_PLANS = 64
"""Plans kept of servers that are not in the present push."""

ANSWER_RESERVE_S = 3.0
"""Of TRANSFER's deadline, kept for saying that a server is too slow while the caller still listens; at most 0.4 of it."""

_WIRES = frozenset({"grpc", "collective"})
"""Transports whose bytes cost more than finding out which of them changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """Which rank of which gang this is. source_id differs for every start of the gang and is the same on all its ranks."""

    rank: int
    world_size: int
    source_id: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedPush:
    push_id: str
    policy_version: int
    servers: tuple[tuple[ServerPart, StagedVersion | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    layout: SinkLayout
    part: ServerPart


class WeightSource:
    """One rank's weight source.

    Args:
        named_parameters: Hugging Face name to live parameter, or to what is computed from several; a plain tensor counts as replicated
            on every rank.
        identity: this rank.
        transport: the trainer's end of all transports; closed by `close`.
        push: the run's settings.
        policy_version: tells the version that the parameters hold now, so that no other version is ever sent under a push's name.
        prepare_thread: called first in every thread that sends.
    Raises: TransportError: a parameter whose local part cannot be told.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, DTensor | Tensor | ComputedTensor],
        identity: SourceIdentity,
        transport: SourceTransport,
        push: PushSection,
        policy_version: Callable[[], int],
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._settings = push
        self._held_version = policy_version
        self._prepare_thread = prepare_thread
        self._tensors = HeldTensors(named_parameters, identity.rank)
        self._shadow = Shadow(self._tensors)
        self._encoder = Encoder(self._tensors, self._shadow, identity.source_id)
        self._source: SourceLayout | None = None
        self._plans: dict[str, _Planned] = {}
        self._push: _PreparedPush | None = None
        self._transferred: SourceTransferred | None = None
        self._stuck: dict[str, threading.Thread] = {}

    @property
    def shadow_bytes(self) -> int:
        """Memory of the copy that deltas are found with."""
        return self._shadow.num_bytes

    def describe(self) -> SourceLayout:
        """Every tensor with the boxes of this rank alone, and its place."""
        return SourceLayout(source_id=self._identity.source_id, tensors=self._tensors.describe(), places=(self._identity.place,))

    def prepare(self, push_id: str, policy_version: int, source: SourceLayout, targets: Sequence[SinkTarget]) -> dict[str, PlannedServer]:
        """Plan the push and keep this rank's parts; replaces whatever was prepared before.

        Args:
            push_id: identity of the push.
            policy_version: version that the bytes will be.
            source: what the whole gang holds.
            targets: the rollout servers.
        Returns: the plan of every server that can be planned, the same on every rank; the others are logged.
        Raises: StateError: the parameters are of another version. TransportError: the layout is not of this gang.
        """
        self._forget_push()
        self._check_version(policy_version)
        self._check_source(source)
        self._plan(source, targets)
        planned = [(self._plans[target.layout.server_id].part, _base(target)) for target in targets if self._is_planned(target)]
        self._prepare_links([part for part, _ in planned])
        self._shadow.require(self._compared_buckets())
        self._push = _PreparedPush(push_id=push_id, policy_version=policy_version, servers=tuple(planned))
        return {part.server_id: PlannedServer(plan_hash=part.plan_hash, num_bytes=part.num_bytes) for part, _ in planned}

    def transfer(self, push_id: str, collective_groups: Mapping[str, str]) -> SourceTransferred:
        """Send this rank's parts to all servers side by side. A repeat sends nothing and answers the same.

        Args:
            collective_groups: by server id, where the collective transport is used.
        Returns: how it went for every server; one that failed or is too slow costs the others nothing.
        Raises: StateError: this push is not the prepared one, or the parameters have moved on to another version.
        """
        started_s = time.monotonic()
        push = self._prepared(push_id)
        self._check_version(push.policy_version)
        if self._transferred is not None:
            # Servers take a bucket once, and the shadow is ahead of what their staging held.
            return self._transferred
        self._stuck = {server_id: thread for server_id, thread in self._stuck.items() if thread.is_alive()}
        servers = {part.server_id: self._without_sending(part) for part, _ in push.servers}
        pushes = {
            part.server_id: self._push_to(push, part, base, collective_groups, started_s)
            for part, base in push.servers
            if servers[part.server_id] is None
        }
        self._encoder.forget_version()
        sent, stuck = send_to_all(pushes, self._transport, self._encoder, self._prepare_thread)
        self._stuck |= stuck
        # Whether a server got everything does not matter: one that did not has no complete version staged, and gets no delta next time.
        self._shadow.update(push.policy_version)
        outcomes = {server_id: sent[server_id] if outcome is None else outcome for server_id, outcome in servers.items()}
        self._transferred = SourceTransferred(servers=outcomes, transfer_ms=(time.monotonic() - started_s) * 1e3)
        return self._transferred

    def abort(self, push_id: str) -> None:
        """Forget a prepared push; another push id, or repeating, changes nothing."""
        if self._push is not None and self._push.push_id == push_id:
            self._forget_push()

    def digest(self, policy_version: int, plan_hashes: Mapping[str, str]) -> dict[str, tuple[PieceDigests, ...]]:
        """Digests of what this rank holds, as its pieces of the last plans.

        Args:
            policy_version: version that is asked for.
            plan_hashes: by server id.
        Raises: StateError: another version is held, or a plan is not the last one of its server.
        """
        self._check_version(policy_version)
        for server_id, plan_hash in plan_hashes.items():
            planned = self._plans.get(server_id)
            if planned is None or planned.part.plan_hash != plan_hash:
                held = "none" if planned is None else planned.part.plan_hash[:12]
                msg = f"rank {self._identity.rank} holds no plan {plan_hash[:12]} of server {server_id} (held: {held}); push to it first"
                raise StateError(msg)
        return {server_id: tuple(self._piece_digests(self._plans[server_id].part)) for server_id in plan_hashes}

    def close(self) -> None:
        """Let go of the servers' staging buffers."""
        self._forget_push()
        self._transport.close()

    def _forget_push(self) -> None:
        self._push, self._transferred = None, None

    def _check_version(self, policy_version: int) -> None:
        held = self._held_version()
        if held != policy_version:
            msg = f"rank {self._identity.rank} holds policy version {held}, not {policy_version}; start a push of the held version"
            raise StateError(msg)

    def _check_source(self, source: SourceLayout) -> None:
        identity = self._identity
        if source.source_id != identity.source_id or len(source.places) != identity.world_size:
            msg = (
                f"the layout is of gang {source.source_id} with {len(source.places)} ranks, "
                f"this is gang {identity.source_id} with {identity.world_size}; describe the source again"
            )
            raise TransportError(msg)

    def _prepared(self, push_id: str) -> _PreparedPush:
        push = self._push
        if push is None or push.push_id != push_id:
            prepared = "none" if push is None else push.push_id
            msg = f"push {push_id} is not prepared on rank {self._identity.rank} (prepared: {prepared}); call prepare first"
            raise StateError(msg)
        return push

    def _plan(self, source: SourceLayout, targets: Sequence[SinkTarget]) -> None:
        """Plan the servers whose layout is new; layouts seldom change between pushes, so the last plan of each server is kept."""
        if self._source != source:
            self._source, self._plans = source, {}
        missing = [target.layout for target in targets if not self._is_planned(target)]
        if not missing:
            return
        plan = plan_push(source, missing, bucket_bytes=self._settings.bucket_bytes, transport=self._settings.transport)
        for server_id, reason in plan.errors.items():
            log.warning("weight_plan_failed", server_id=server_id, rank=self._identity.rank, reason=reason)
        for layout in missing:
            # Also forgets the former plan of a server that can no longer be planned.
            self._plans.pop(layout.server_id, None)
            if layout.server_id in plan.servers:
                self._plans[layout.server_id] = _Planned(layout=layout, part=self._part(layout, plan.servers[layout.server_id]))
        self._encoder.forget_plans()
        self._drop_old_plans({target.layout.server_id for target in targets})

    def _prepare_links(self, parts: Sequence[ServerPart]) -> None:
        for pair in (pair for part in parts for pair in part.pairs):
            # TRANSFER reports a worker that cannot be reached.
            with suppress(ShoalError):
                self._transport.prepare(pair.worker, pair.transport)

    def _is_planned(self, target: SinkTarget) -> bool:
        planned = self._plans.get(target.layout.server_id)
        return planned is not None and planned.layout == target.layout

    def _drop_old_plans(self, present: set[str]) -> None:
        others = [server_id for server_id in self._plans if server_id not in present]
        for server_id in others[: max(len(others) - MAX_PLANS, 0)]:
            del self._plans[server_id]

    def _part(self, layout: SinkLayout, plan: ServerPlan) -> ServerPart:
        rank = self._identity.rank
        workers = {worker.worker_rank: worker for worker in layout.workers}
        pairs = []
        for worker_rank in sorted(worker_rank for of_rank, worker_rank in plan.pairs() if of_rank == rank):
            transport = plan.transport_of(rank, worker_rank)
            buckets = plan.buckets(rank, worker_rank)
            compares = self._compares(transport, buckets)
            pairs.append(PairPart(worker=workers[worker_rank], transport=transport, buckets=buckets, compares=compares))
        return ServerPart(
            server_id=layout.server_id,
            plan_hash=plan.plan_hash,
            num_bytes=plan.num_bytes,
            num_workers=len(workers),
            pairs=tuple(pairs),
        )

    def _compares(self, transport: str, buckets: Sequence[Bucket]) -> bool:
        if self._settings.delta != "auto":
            return self._settings.delta == "on"
        # An optimizer step changes nearly every element of the trainer's own dtype; rounding to a narrower one hides most of that.
        is_narrower = any(
            item_bytes(bucket.dtype, "a bucket") < self._tensors.item_bytes(piece.source_name)
            for bucket in buckets
            for piece in bucket.pieces
        )
        return transport in _WIRES and is_narrower

    def _compared_buckets(self) -> Iterator[Bucket]:
        """Buckets that need the shadow: the frozen ones do not."""
        for planned in self._plans.values():
            for pair in planned.part.pairs:
                if pair.compares:
                    yield from (bucket for bucket in pair.buckets if not self._encoder.is_frozen(bucket))

    def _without_sending(self, part: ServerPart) -> ServerTransfer | None:
        """The outcome where there is nothing to send, or nothing can be; None otherwise."""
        if part.server_id in self._stuck:
            stuck = f"rank {self._identity.rank} is still stuck in an earlier push to this server"
            return failed(f"{stuck}; the next push tries again, restart the server if it stays so")
        return None if part.pairs else ServerTransfer(pairs=(), sent_bytes=0, dense_bytes=0)

    def _push_to(
        self, push: _PreparedPush, part: ServerPart, base: StagedVersion | None, groups: Mapping[str, str], started_s: float
    ) -> PushTo:
        timeout_s = self._settings.transfer_timeout_s
        return PushTo(
            push_id=push.push_id,
            policy_version=push.policy_version,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            part=part,
            base=base,
            collective_group=groups.get(part.server_id, ""),
            deadline=started_s + sending_s(timeout_s),
            gives_up=started_s + sending_s(timeout_s) + stuck_grace_s(timeout_s),
        )

    def _piece_digests(self, part: ServerPart) -> Iterator[PieceDigests]:
        for pair in part.pairs:
            digests = (
                canonical_digest(self._tensors.piece(piece.source_name, piece.source_box, torch_dtype(bucket.dtype)), bucket.dtype)
                for bucket in pair.buckets
                for piece in bucket.pieces
            )
            yield PieceDigests(rank=self._identity.rank, worker_rank=pair.worker.worker_rank, xxh3=tuple(digests))


def sending_s(transfer_timeout_s: float) -> float:
    """How long a rank sends to a server: one that is too slow must not cost the others the push."""
    return transfer_timeout_s - min(ANSWER_RESERVE_S, 0.4 * transfer_timeout_s)


def stuck_grace_s(transfer_timeout_s: float) -> float:
    """How much longer a server's thread is waited for; half of what is reserved for the answer at most."""
    return min(STUCK_GRACE_S, (transfer_timeout_s - sending_s(transfer_timeout_s)) / 2)


def _base(target: SinkTarget) -> StagedVersion | None:
    return None if target.dense else target.staged
