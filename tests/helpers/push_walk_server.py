"""A rollout server of the push walk: the real sink, workers, staging and bulk stream over a scripted engine, and a script of faults."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from shoal_coordinator.push_calls import WeightSource
from shoal_rollout.weight_sink import WeightSink
from shoal_rollout.weight_sink_servicer import SERVICE_NAME, WeightSinkServicer
from shoal_rollout.worker_layout import Plain

from shoal.config.models import PushSection, SecuritySection
from shoal.errors import UnavailableError
from shoal.rpc.server import RpcServer
from shoal.types import InflightMode, SinkCommitted, SinkPlanned, SinkPrepared, SinkVerified, SourceLayout
from shoal.types.weights import BucketEncoding, PairDigests, PieceDigests, PlannedServer, SinkTarget, SourceTransferred
from shoal.weights.transports.staging import box_view
from tests.helpers.engine_fakes import SteppedEngine
from tests.helpers.push_walk_model import Versions, WalkModel, difference

Answer = TypeVar("Answer")
_serial = itertools.count()


class QueuedEngine(SteppedEngine):
    """An engine that does as vLLM: a call of the workers is queued, and carried out whether or not its caller still waits."""

    def __init__(self, models: Sequence[WalkModel]) -> None:
        super().__init__(models)  # type: ignore[arg-type]  # a model of its own kind
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[list[Plain]]] = set()

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """Queue a call and wait for its answer."""
        call = asyncio.create_task(self._in_turn(method, args))
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return await asyncio.shield(call)

    async def _in_turn(self, method: str, args: tuple[Plain, ...]) -> list[Plain]:
        async with self._turn:
            await asyncio.sleep(0)
            return await super().call_workers(method, *args)

    def _forget(self, call: asyncio.Task[list[Plain]]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()


class Script:
    """What goes wrong around the calls of one push.

    faults: by end and call, one of before (lost), after (the answer is lost), both also with `always_` for a call that is made again,
    twice (it is repeated), cancel and cancel_soon (of the push), leave_out (of the server), rival (another push runs meanwhile), slow.
    """

    def __init__(self) -> None:
        self.faults: dict[tuple[str, str], str] = {}
        self.on_cancel: Callable[[], object] = lambda: None
        self.on_leave_out: Callable[[str], None] = lambda _: None
        self.on_rival: Callable[[], Awaitable[None]] | None = None
        self.flipped: str = ""
        self.expiring: str = ""

    async def around(self, end: str, call: str, run: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make a call, or not."""
        how = self.faults.get((end, call), "")
        if not how.startswith("always"):
            self.faults.pop((end, call), None)
        if how == "cancel":
            self.on_cancel()
        elif how.startswith("cancel_soon"):
            asyncio.get_running_loop().call_later(float(how.removeprefix("cancel_soon ")), self.on_cancel)
        elif how == "leave_out":
            self.on_leave_out(end)
        elif how == "rival" and self.on_rival is not None:
            await self.on_rival()
        elif how.endswith("before"):
            raise UnavailableError(f"the test loses {call}")
        elif how == "twice":
            await run()
        elif how == "slow":
            await asyncio.sleep(0.03)
        answer = await run()
        if how.endswith("after"):
            raise UnavailableError(f"the test loses the answer of {call}")
        return answer


class WalkServer:
    """A server; `start` it again after `stop` to have one that knows nothing.

    Args:
        folder: of its staging files; servers with another folder than the trainer's are on another host, as far as a push can tell.
    """

    def __init__(self, name: str, folder: Path, push: PushSection, *, num_workers: int, norm_dtype: str) -> None:
        self.name = name
        self.script = Script()
        self._push = push.model_copy(update={"shm_dir": str(folder)})
        self._num_workers = num_workers
        self._norm_dtype = norm_dtype
        self.committed: list[int] = []
        self.failed: list[str] = []

    async def start(self) -> None:
        """A fresh process."""
        self.models = [WalkModel(worker, self._num_workers, self._norm_dtype) for worker in range(self._num_workers)]
        self.engine = QueuedEngine(self.models)
        self.committed, self.failed = [], []
        self.sink = WeightSink(
            self.engine,
            server_id=self.name,
            staging_name=f"walk-{self.name}-p{next(_serial)}",
            push=self._push,
            on_committed=self.committed.append,
            on_failed=self.failed.append,
        )
        await self.sink.reserve()
        self._rpc = RpcServer("127.0.0.1", 0, SecuritySection())
        self._rpc.add(WeightSinkServicer(self.sink).add_to, SERVICE_NAME)
        self.sink.listen_at(f"127.0.0.1:{await self._rpc.start()}")

    async def stop(self) -> None:
        """End the process."""
        self.engine.failures = {}
        await self.sink.close()
        await self._rpc.stop(0.0)

    def served_difference(self, version: Versions | None) -> str:
        """What of the live weights is not a version's; None stands for the zeros of the start."""
        for worker, model in enumerate(self.models):
            expected = (
                {name: torch.zeros_like(weight) for name, weight in model.weights.items()} if version is None else model.expected(version)
            )
            if found := difference(model.weights, expected):
                return f"worker {worker}: {found}"
        return ""

    def staged_difference(self, version: Versions) -> str:
        """What of staging is not a version's."""
        for worker, model in enumerate(self.models):
            sink = self.engine.workers.workers[worker].shoal_sink
            assert sink is not None
            if found := difference({name: sink._staged(name) for name in model.weights}, model.expected(version)):
                return f"worker {worker}: {found}"
        return ""

    def flip(self, rng: random.Random, pairs: Sequence[PairDigests]) -> bool:
        """Flip a bit of a staged element that was sent; False if nothing was."""
        plan = self.sink._plan
        assert plan is not None
        sent = [
            (pair.worker_rank, plan.buckets(pair.rank, pair.worker_rank)[index])
            for pair in pairs
            for index, encoding in enumerate(pair.encodings)
            if encoding is not BucketEncoding.UNCHANGED
        ]
        if not sent:
            return False
        worker_rank, bucket = rng.choice(sent)
        piece = rng.choice(bucket.pieces)
        sink = self.engine.workers.workers[worker_rank].shoal_sink
        assert sink is not None
        view = box_view(sink._staged(piece.parameter), piece.parameter, piece.parameter_box)
        bits = view.view(torch.int16 if view.element_size() == 2 else torch.int32)
        where = tuple(rng.randrange(size) for size in bits.shape)
        bits[where] ^= 1
        return True


class WalkSink:
    """A coordinator's `PushSink` for a server, with the script's faults."""

    def __init__(self, server: WalkServer, script: Script, rng: random.Random) -> None:
        self._server = server
        self._script = script
        self._rng = rng

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        """See `PushSink.prepare`."""
        if self._script.expiring == self._server.name:
            expires_s = 0.02
        return await self._around("prepare", lambda: self._server.sink.prepare(push_id, policy_version, expires_s))

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        """See `PushSink.plan`."""
        return await self._around("plan", lambda: self._server.sink.plan(push_id, policy_version, plan_hash, source))

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        """See `PushSink.verify`."""
        if self._script.flipped == self._server.name and self._server.sink._plan is not None and not self._server.flip(self._rng, pairs):
            self._script.flipped = ""
        return await self._around("verify", lambda: self._server.sink.verify(push_id, policy_version, plan_hash, pairs))

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        """See `PushSink.commit`."""
        return await self._around("commit", lambda: self._server.sink.commit(push_id, policy_version, inflight, timeout_s))

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        """See `PushSink.abort`."""
        return await self._around("abort", lambda: self._server.sink.abort(push_id))

    async def digest(self, policy_version: int, plan_hash: str, *, timeout_s: float) -> tuple[PieceDigests, ...]:
        """See `SinkDigests.digest`."""
        return await self._server.sink.digest(policy_version, plan_hash)

    async def _around(self, call: str, run: Callable[[], Awaitable[Answer]]) -> Answer:
        return await self._script.around(self._server.name, call, run)


class ScriptedSource:
    """A coordinator's `WeightSource` with the script's faults."""

    def __init__(self, source: WeightSource, script: Script) -> None:
        self._source = source
        self._script = script

    async def describe(self, *, timeout_s: float) -> tuple[SourceLayout, int]:
        """See `WeightSource.describe`."""
        return await self._script.around("source", "describe", lambda: self._source.describe(timeout_s=timeout_s))

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> Mapping[str, PlannedServer]:
        """See `WeightSource.prepare`."""
        run = partial(self._source.prepare, push_id, policy_version, sinks, timeout_s=timeout_s)
        return await self._script.around("source", "prepare", run)

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        """See `WeightSource.transfer`."""
        run = partial(self._source.transfer, push_id, collective_groups, timeout_s=timeout_s)
        return await self._script.around("source", "transfer", run)

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """See `WeightSource.abort`."""
        await self._script.around("source", "abort", lambda: self._source.abort(push_id, timeout_s=timeout_s))

    async def digest(
        self, policy_version: int, plan_hashes: Mapping[str, str], *, timeout_s: float
    ) -> Mapping[str, tuple[PieceDigests, ...]]:
        """See `WeightSource.digest`."""
        return await self._source.digest(policy_version, plan_hashes, timeout_s=timeout_s)
