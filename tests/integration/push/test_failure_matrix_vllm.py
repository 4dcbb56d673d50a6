"""Some cells of the failure matrix with real vLLM engines: the same faults, the same end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.push_matrix_cells import CELLS, PROCESS_OF, Cell, Served
from tests.helpers.push_matrix_cluster import SERVERS, Zygote
from tests.helpers.push_matrix_engines import EngineCluster
from tests.helpers.push_matrix_faults import Fault, arm, has_struck
from tests.helpers.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GRACE_S = 5.0
STEP_TIMEOUT_S = 90.0
VICTIM_SERVER, OTHER_SERVER = SERVERS


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-matrix-"))
    zygote = Zygote(folder)
    yield zygote
    zygote.close()
    shutil.rmtree(folder)


@asynccontextmanager
async def running(zygote: Zygote, model: Path) -> AsyncIterator[EngineCluster]:
    folder = Path(tempfile.mkdtemp(prefix="shoal-matrix-"))
    cluster = EngineCluster(zygote, folder, model)
    try:
        await cluster.start()
        yield cluster
    except BaseException as error:
        error.add_note(cluster.logs())
        cluster.kill()
        raise
    else:
        cluster.close()
        assert cluster.staging_files() == []
    finally:
        shutil.rmtree(folder)


def cell_of(victim: str, stage: str, kind: str) -> Cell:
    (cell,) = [cell for cell in CELLS if (cell.victim, cell.stage, cell.kind) == (victim, stage, kind)]
    return cell


SAMPLE = [
    cell_of("rollout server", "transfer", "kill"),
    cell_of("engine worker", "commit", "stop"),
    cell_of("trainer rank", "transfer", "kill"),
]


async def test_faults_with_real_engines_leave_complete_versions_only(zygote: Zygote, tmp_path: Path) -> None:
    """One start of the engines for all cells, since it takes most of the time."""
    async with running(zygote, save_tiny_model(tmp_path / "model")) as cluster:
        for cell in SAMPLE:
            await play(cluster, cell)


async def play(cluster: EngineCluster, cell: Cell) -> None:
    old = (await cluster.status())["policy_version"]
    plans = await cluster.plans()
    before = {server: await cluster.live(server, old, plans[server]) for server in SERVERS}
    arm(cluster.folder, armed(cluster, cell))
    victim = cluster.pid_of(PROCESS_OF[cell.victim])
    report = await cluster.ask("step", STEP_TIMEOUT_S)
    assert has_struck(cluster.folder)
    check_report(cluster, cell, report)
    for server, served in ((VICTIM_SERVER, cell.victim_server), (OTHER_SERVER, cell.other_server)):
        if served is Served.OLD:
            assert await cluster.live(server, old, plans[server]) == before[server]
        elif served is Served.NEW:
            assert (await cluster.ask("audit", STEP_TIMEOUT_S))["servers"] == {server: "equal"}
    await end_fault(cluster, cell, victim)
    await cluster.heal()
    await check_mended(cluster)


def armed(cluster: EngineCluster, cell: Cell) -> Fault:
    fault = cell.armed(cluster)
    if cell.victim != "engine worker":
        return fault
    # The engine is not the test's own: it is stopped as the coordinator calls COMMIT.
    return Fault(at=f"coordinator:{cell.stage}", kind=fault.kind, process_id=fault.process_id, signal_number=fault.signal_number)


def check_report(cluster: EngineCluster, cell: Cell, report: dict[str, Any]) -> None:
    assert report["elapsed_s"] <= cluster.deadlines_s + GRACE_S
    assert report["traffic"] == report["committed"]
    assert report["committed"] == ([] if cell.other_server is Served.OLD else [OTHER_SERVER]), report


async def end_fault(cluster: EngineCluster, cell: Cell, victim: int) -> None:
    if cell.kind == "stop":
        os.kill(victim, signal.SIGCONT)
    else:
        await cluster.until_ended(PROCESS_OF[cell.victim])


async def check_mended(cluster: EngineCluster) -> None:
    report = await cluster.ask("step", STEP_TIMEOUT_S)
    assert report["committed"] == list(SERVERS), report
    assert (await cluster.ask("audit", STEP_TIMEOUT_S))["servers"] == dict.fromkeys(SERVERS, "equal")
    assert (await cluster.ask("generate", STEP_TIMEOUT_S))["versions"] == [report["policy_version"]]
    assert len(cluster.staging_files()) == len(SERVERS)
