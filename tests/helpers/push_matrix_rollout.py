"""A rollout server of the failure matrix: the real server around a scripted engine, whose worker is a process of its own.

The worker holds plain tensors and the real worker sink; the engine's "tokens" are fingerprints of the tensors that are live when they are
"sampled", so every completion tells whether it came from one complete version.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from shoal_rollout import weight_sink_servicer
from shoal_rollout.engine import EngineSample, worker_values
from shoal_rollout.engine_worker import EngineWorker, _answer
from shoal_rollout.model_facts import ModelFacts
from shoal_rollout.server import RolloutServer
from shoal_rollout.weight_sink_servicer import WeightSinkServicer
from shoal_rollout.worker_layout import Plain, layout_from_plain, layout_to_plain
from shoal_rollout.worker_sink import WorkerSink

from shoal.errors import UnavailableError
from shoal.process import set_parent_death_signal
from shoal.rpc.v1 import weights_pb2
from shoal.types import Box, InflightMode, SamplingParams, SinkWorkerLayout
from tests.helpers.push_matrix_config import load
from tests.helpers.push_matrix_faults import FaultBox, flip_byte
from tests.helpers.push_matrix_model import PlainModel

FACTS = ModelFacts(folder="none", vocab_size=1 << 30, sampled_vocab_size=1 << 30, max_model_len=64, eos_ids=())
MAX_LINE_BYTES = 16 << 20


class PlainWorker(EngineWorker):
    """The worker's side; the methods that a push calls are the real ones."""

    def __init__(self, faults: FaultBox) -> None:
        self.rank = 0
        self.shoal_sink = None
        self._model = PlainModel()
        self._faults = faults
        self._staging = ""

    def shoal_discover(self, folder: str) -> Plain:
        """Take the plain model."""

        def run() -> Plain:
            self.shoal_sink = WorkerSink(self._model, self.rank, "cpu")
            return ["copies", ""]

        return _answer(run)

    def shoal_prepare(self, *arguments: Plain) -> Plain:
        """PREPARE."""
        fault = self._faults.enter("prepare")
        answer = super().shoal_prepare(*arguments)
        if answer[0] == "ok":
            layout = layout_from_plain(answer[1][0])
            self._staging = layout.endpoints["shm"]
            if fault == "impossible layout":
                answer[1][0] = layout_to_plain(spoilt(layout))
        return answer

    def shoal_start_verify(self, pairs: Plain) -> Plain:
        """VERIFY."""
        fault = self._faults.enter("verify")
        if fault == "flipped byte":
            flip_byte(self._staging)
        if fault == "wrong digest":
            pairs[0][2][0] ^= 1
        return super().shoal_start_verify(pairs)

    def shoal_commit(self) -> Plain:
        """COMMIT."""
        fault = self._faults.enter("commit")
        if fault == "half swap":
            self._model.fail_after = 1
        answer = super().shoal_commit()
        if fault == "wrong tensor":
            self._model.spoil("head")
        return answer

    def test_fingerprints(self) -> Plain:
        """What "sampling" answers."""
        return ["ok", self._model.fingerprints()]


def spoilt(layout: SinkWorkerLayout) -> SinkWorkerLayout:
    """The same layout, but its first region lies outside the parameter."""
    first = layout.regions[0]
    outside = Box(offsets=(1000, *first.parameter_box.offsets[1:]), sizes=first.parameter_box.sizes)
    return dataclasses.replace(layout, regions=(dataclasses.replace(first, parameter_box=outside), *layout.regions[1:]))


def run_worker(connection: socket.socket, faults: FaultBox) -> None:
    """Answer calls, one after the other, until the server is gone."""
    worker = PlainWorker(faults)
    with connection.makefile("rwb") as stream:
        for line in stream:
            number, method, arguments = json.loads(line)
            answer = getattr(worker, method)(*arguments)
            stream.write(json.dumps([number, answer]).encode() + b"\n")
            stream.flush()


class ScriptedEngine:
    """The engine's side in the server's process; `connect` it on the event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_dead = False
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Plain]] = {}
        self._version = "0"
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def connect(self) -> asyncio.Task[None]:
        """Begin to read answers."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        return asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        # A worker that dies with calls unread resets the connection.
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                number, answer = json.loads(line)
                future = self._waiting.pop(number)
                if not future.done():
                    future.set_result(answer)
        self.is_dead = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(UnavailableError("the engine's worker has died; this server is ending"))

    async def _call(self, method: str, *arguments: Plain) -> Plain:
        if self.is_dead:
            raise UnavailableError("the engine's worker has died; this server is ending")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps([number, method, arguments]).encode() + b"\n")
        return await future

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """See `SwappableEngine`."""
        return worker_values([await self._call(method, *args)])

    async def sample(self, sample_id: str, prompt_ids: list[int], params: object) -> EngineSample:
        """See `SamplingEngine`: the fingerprints of the live tensors."""
        await self._may_run.wait()
        version = self._version
        (tokens,) = await self.call_workers("test_fingerprints")
        return EngineSample(token_ids=tokens, logprobs=[-1.0] * len(tokens), finish_reason="length", versions=[(version, 0, len(tokens))])

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """See `SamplingEngine`: samples end by themselves."""

    def make_params(self, sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> object:
        """See `SamplingEngine`."""
        return sampling

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """See `SwappableEngine`. Whatever was asked of the worker before is answered before the swap."""
        self._may_run.clear()
        return 0

    async def finish_swap(self, version: str) -> None:
        """See `SwappableEngine`."""
        self._version = version

    async def update_version(self, version: str) -> None:
        """Tag tokens sampled from now on."""
        self._version = version

    async def resume(self) -> None:
        """See `SwappableEngine`."""
        self._may_run.set()


class FaultyServicer(WeightSinkServicer):
    """The server's end of a push, which meets its faults."""

    faults: FaultBox

    async def PrepareSink(self, request: weights_pb2.PrepareSinkRequest, context: Any) -> weights_pb2.PrepareSinkResponse:  # noqa: ANN401
        """PREPARE."""
        self.faults.enter("prepare")
        return await super().PrepareSink(request, context)

    async def PlanSink(self, request: weights_pb2.PlanSinkRequest, context: Any) -> weights_pb2.PlanSinkResponse:  # noqa: ANN401
        """PREPARE, once the coordinator has planned."""
        fault = self.faults.enter("plan")
        if fault == "other plan":
            # Rank 0 holds one row less, rank 1 one more.
            first, second = request.source.tensors[0].shards
            first.box.sizes[0] -= 1
            second.box.offsets[0] -= 1
            second.box.sizes[0] += 1
        answer = await super().PlanSink(request, context)
        if fault == "early drop":
            await super().AbortSink(weights_pb2.AbortSinkRequest(push_id=request.push_id), context)
        return answer

    async def VerifySink(self, request: weights_pb2.VerifySinkRequest, context: Any) -> weights_pb2.VerifySinkResponse:  # noqa: ANN401
        """VERIFY."""
        if self.faults.enter("verify") == "changed digest":
            request.pairs[0].xxh3[0] ^= 1
        return await super().VerifySink(request, context)

    async def CommitSink(self, request: weights_pb2.CommitSinkRequest, context: Any) -> weights_pb2.CommitSinkResponse:  # noqa: ANN401
        """COMMIT."""
        fault = self.faults.enter("commit")
        answer = await super().CommitSink(request, context)
        if fault == "other version":
            answer.policy_version += 1
        return answer


def main(folder: str, name: str, coordinator: str) -> int:
    """Run until told to stop, or until the worker dies."""
    ours, theirs = socket.socketpair()
    path = Path(folder)
    worker_name = name.replace("rollout", "worker")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            set_parent_death_signal()
            ours.close()
            run_worker(theirs, FaultBox(path, worker_name))
            code = 0
        except BaseException:  # noqa: BLE001 - the edge of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    theirs.close()
    (path / f"{name}.worker").write_text(str(pid))
    try:
        return asyncio.run(_serve(path, name, coordinator, ours))
    finally:
        ours.close()
        os.waitpid(pid, 0)


async def _serve(folder: Path, name: str, coordinator: str, connection: socket.socket) -> int:
    config = load(folder, name)
    FaultyServicer.faults = FaultBox(folder, name)
    weight_sink_servicer.WeightSinkServicer = FaultyServicer  # type: ignore[misc]
    engine = ScriptedEngine(connection)
    reading = await engine.connect()
    server = RolloutServer(cast(Any, engine), FACTS, config, service_id=name, host="127.0.0.1", port=0, coordinator=coordinator)

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        sink, generation = server._sink, server._generation
        (live,) = await engine.call_workers("test_fingerprints")
        answer = {
            "address": f"127.0.0.1:{server._rpc.port}",
            "served": sink.served_version,
            "reported": generation.policy_version,
            "state": sink.state,
            "live": live,
        }
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    control = await asyncio.start_unix_server(tell, folder / f"{name}-{os.getpid()}.sock")
    try:
        return await server.run()
    finally:
        control.close()
        reading.cancel()
