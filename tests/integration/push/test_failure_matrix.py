"""Every process of a push, in every stage, killed, stopped or lying: the push ends, and all that serve serve one complete version.

Real processes: a gang of two ranks, two rollout servers with an engine worker each, a coordinator. Only the engine is scripted. All cells
are played in one cluster, one after the other, so each also shows that the one before left nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.clients.rollout import RolloutClient
from shoal.config.models import SecuritySection
from shoal.errors import ShoalError
from shoal.types import SamplingParams
from tests.helpers.processes import wait_gone
from tests.helpers.push_matrix_cells import AUDIT_CELLS, CELLS, COMMIT_OF, PROCESS_OF, WIRE_CELLS, Cell, Served
from tests.helpers.push_matrix_cluster import SERVERS, Cluster, Zygote
from tests.helpers.push_matrix_config import DEADLINES_S, RUN_ID
from tests.helpers.push_matrix_faults import arm, has_struck
from tests.helpers.push_matrix_model import fingerprints_at
from tests.helpers.push_matrix_table import outcome_table

GRACE_S = 5.0
STEP_TIMEOUT_S = 30.0
VICTIM_SERVER, OTHER_SERVER = SERVERS
SAMPLING = SamplingParams(max_new_tokens=4)


class Stage:
    """The clusters that the cells are played in, one for each transport; a new one after a cell that failed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-matrix-"))
        self.zygote = Zygote(self.folder)
        self._clusters: dict[str, Cluster] = {}
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._num_clusters = 0

    async def ready(self, transport: str) -> Cluster:
        """A cluster that serves."""
        if transport not in self._clusters:
            self._num_clusters += 1
            folder = self.folder / str(self._num_clusters)
            folder.mkdir()
            cluster = Cluster(self.zygote, folder, push={"transport": transport, "commit": COMMIT_OF[transport]})
            await cluster.start()
            self._clusters[transport] = cluster
        return self._clusters[transport]

    def give_up(self, transport: str) -> None:
        """Kill what a failed cell left."""
        self._clusters.pop(transport).kill()

    def close(self) -> None:
        """End the clusters in order and check that nothing is left of them."""
        try:
            for cluster in self._clusters.values():
                cluster.close()
                assert cluster.staging_files() == []
            assert list(Path("/dev/shm").glob(f"*shoal-{RUN_ID}-*")) == []
        finally:
            self.zygote.close()
            shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
    show(request.config, outcome_table(stage.outcomes))


def show(config: pytest.Config, table: str) -> None:
    """Print the outcomes under `pytest -v`."""
    reporter, capture = config.pluginmanager.get_plugin("terminalreporter"), config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None and config.get_verbosity() > 0:
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n{table}")


def parameters(cells: Sequence[Cell]) -> list[Any]:
    return [pytest.param(cell, id=cell.name, marks=[pytest.mark.slow] if cell.slow else []) for cell in cells]


@pytest.mark.parametrize("cell", parameters(CELLS))
async def test_fault_leaves_complete_versions_only(stage: Stage, cell: Cell) -> None:
    await play(stage, cell)


@pytest.mark.parametrize("cell", parameters(AUDIT_CELLS))
async def test_fault_that_only_an_audit_finds(stage: Stage, cell: Cell) -> None:
    await play(stage, cell)


@pytest.mark.parametrize("cell", parameters(WIRE_CELLS))
async def test_fault_over_a_wire_or_in_a_rolling_commit(stage: Stage, cell: Cell) -> None:
    await play(stage, cell)


async def play(stage: Stage, cell: Cell) -> None:
    """Play one cell; a failure costs the cluster."""
    cluster = await stage.ready(cell.transport)
    try:
        stage.outcomes[cell.name] = await Play(cluster, cell).run()
    except BaseException as error:
        error.add_note(cluster.logs())
        stage.give_up(cell.transport)
        raise


class Play:
    """One cell in a cluster where everything serves one version."""

    def __init__(self, cluster: Cluster, cell: Cell) -> None:
        self._cluster = cluster
        self._cell = cell
        self._old = 0
        self._victim = cluster.pid_of(PROCESS_OF[cell.victim])

    async def run(self) -> dict[str, Any]:
        """Push under the fault, look at what is left, mend, push again; answers what is worth telling."""
        cluster = self._cluster
        self._old = (await cluster.status())["policy_version"]
        arm(cluster.folder, self._cell.armed(cluster))
        async with self._traffic() as seen:
            if self._stops_coordinator:
                report = await self._push_by_stopped()
            else:
                report = await self._push()
            await cluster.heal()
        assert seen[OTHER_SERVER] > 0, "the other server answered nobody"
        await self._check_mended()
        return {"cell": self._cell, "report": report}

    @property
    def _stops_coordinator(self) -> bool:
        return (self._cell.victim, self._cell.kind) == ("coordinator", "stop")

    async def _push(self) -> dict[str, Any]:
        """A push under the fault; answers how it ended."""
        cluster, cell = self._cluster, self._cell
        report = await cluster.ask("step", STEP_TIMEOUT_S)
        audit = await cluster.ask("audit", STEP_TIMEOUT_S) if cell.audited else {}
        assert has_struck(cluster.folder), f"the fault at {cell.at} was never met"
        self._check_report(report, audit)
        await self._check_servers()
        await self._go_on_without_victim()
        await self._end_fault()
        return report

    async def _push_by_stopped(self) -> dict[str, Any]:
        """A push whose coordinator stops: the servers give it up by themselves, and it ends once the coordinator goes on."""
        cluster = self._cluster
        step = asyncio.create_task(cluster.ask("step", 2 * STEP_TIMEOUT_S))
        await cluster.until_stopped("coordinator")
        for server in SERVERS:
            await cluster.until_dropped(server, DEADLINES_S + GRACE_S)
        await self._check_servers()
        await self._end_fault()
        async with asyncio.timeout(DEADLINES_S + GRACE_S):
            return await step

    def _check_report(self, report: dict[str, Any], audit: dict[str, Any]) -> None:
        if self._cell.victim == "coordinator" and self._cell.fault == "kill":
            assert report == {}
            return
        assert "error" not in report, report
        assert report["elapsed_s"] <= DEADLINES_S + GRACE_S, report
        assert report["policy_version"] == self._old + 1
        # Whoever missed the push is fenced, everybody else is not.
        assert report["traffic"] == report["committed"] == self._cell.committed, report
        if audit:
            assert audit["result"] == "differs", audit
            assert audit["traffic"] == [OTHER_SERVER], audit

    async def _check_servers(self) -> None:
        """What each server that lives serves, before anything is mended."""
        cell = self._cell
        for server, served in ((VICTIM_SERVER, cell.victim_server), (OTHER_SERVER, cell.other_server)):
            if served in (Served.OLD, Served.NEW) and not self._is_caught_up_at_once(served):
                await self._cluster.check_complete(server, self._old + (served is Served.NEW))
            elif served in (Served.OLD, Served.NEW):
                await self._cluster.check_complete(server, self._old, self._old + 1)

    def _is_caught_up_at_once(self, served: Served) -> bool:
        """A server that missed the push, while gang and coordinator are well, may have caught up by now."""
        return served is Served.OLD and self._cell.fault == "wrong digest"

    async def _go_on_without_victim(self) -> None:
        """Pushes and generation go on with the server that is left."""
        if self._cell.victim_server not in (Served.NOTHING, Served.LATER):
            return
        report = await self._cluster.ask("step", STEP_TIMEOUT_S)
        assert report["elapsed_s"] <= DEADLINES_S + GRACE_S, report
        assert OTHER_SERVER in report["committed"], f"{report}\n{self._cluster.logs()}"
        assert report["traffic"] == report["committed"], report
        version = await self._cluster.check_complete(OTHER_SERVER, self._old + 2)
        answer = await self._cluster.ask("generate", STEP_TIMEOUT_S)
        assert (answer["server"], answer["tokens"]) == (OTHER_SERVER, fingerprints_at(version)), answer

    async def _end_fault(self) -> None:
        if self._cell.kind == "stop":
            os.kill(self._victim, signal.SIGCONT)
        elif self._cell.kind == "kill":
            await self._cluster.until_ended(PROCESS_OF[self._cell.victim])

    async def _check_mended(self) -> None:
        """Both servers serve the next push, and nothing is left of what ended."""
        cluster = self._cluster
        report = await cluster.ask("step", STEP_TIMEOUT_S)
        assert report.get("committed") == list(SERVERS), f"{report}\n{cluster.logs()}"
        assert (await cluster.ask("audit", STEP_TIMEOUT_S))["result"] == "equal"
        for server in SERVERS:
            await cluster.check_complete(server, report["policy_version"])
        assert len(cluster.staging_files()) == len(SERVERS), cluster.staging_files()
        assert wait_gone(cluster.former_pids(), 5) == []

    @asynccontextmanager
    async def _traffic(self) -> AsyncIterator[dict[str, int]]:
        """Generate on both servers all the time; every answer must come from one complete version, the one that it names."""
        addresses = (await self._cluster.status())["addresses"]
        seen = dict.fromkeys(SERVERS, 0)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._generate(server, addresses[server], seen)) for server in SERVERS]
            yield seen
            for task in tasks:
                task.cancel()

    async def _generate(self, server: str, address: str, seen: dict[str, int]) -> None:
        async with RolloutClient(address, SecuritySection()) as client:
            while True:
                with contextlib.suppress(ShoalError):
                    call = client.generate(uuid.uuid4().hex, [1], SAMPLING, 1, timeout_s=1.0)
                    async with aclosing(call) as stream:
                        async for completion in stream:
                            self._check_completion(completion.policy_version_spans[0].policy_version, completion.response_ids.tolist())
                            seen[server] += 1
                await asyncio.sleep(0.02)

    def _check_completion(self, policy_version: int, tokens: list[int]) -> None:
        if self._cell.kind != "wrong tensor":
            assert tokens == fingerprints_at(policy_version), f"an answer of version {policy_version} is not of that version"
