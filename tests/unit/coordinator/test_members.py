"""What the fleet keeps about a server."""

from __future__ import annotations

from pathlib import Path

from shoal_coordinator.members import RolloutMember
from shoal_coordinator.states import RunState

from shoal.errors import StateError
from shoal.types import ServiceInfo, ServiceKind
from tests.helpers.run_fakes import RunHarness


def rests_after(num_failures: int, run: RunHarness) -> float:
    """Seconds that a server is left out of pushes after so many failures."""
    info = ServiceInfo(
        run_id="r", service_id="rollout-9", kind=ServiceKind.ROLLOUT, address="h:1", incarnation="i", policy_version=0, process_id=1
    )
    connector = run.connector
    member = RolloutMember(info=info, client=connector.rollout("h:1"), sink=connector.sink("h:1"), served_version=0)
    for _ in range(num_failures):
        member.note_failure("verify: digest differs", now_s=100.0)
    rest_s = max(member.rests_until_s - 100.0, 0.0)
    member.note_commit(1, None, dense=True)
    assert member.rests_until_s == 0.0
    return rest_s


async def test_server_that_goes_on_failing_rests_longer_up_to_a_bound(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        assert [rests_after(num, run) for num in (0, 1, 2, 3, 4, 7, 50)] == [0.0, 0.0, 1.0, 2.0, 4.0, 32.0, 32.0]
        run.join_all()
        await run.until(RunState.FINISHED)


async def test_resting_server_costs_no_push_and_is_caught_up_later(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 3}) as run:
        broken = run.connector.sink("rollout-1:1")
        # A step's push, the catch-up at once, and then it rests for a second.
        broken.faults["verify"] = [StateError("digest differs"), StateError("digest differs")]
        run.join("rollout-1")
        run.workload.hold_at = 2
        run.join_all()
        await run.workload.holding.wait()
        await run.until_true(lambda: broken.calls.count("verify") == 2)
        run.workload.holding.clear()
        run.workload.hold_at = 3
        run.workload.release.set()
        run.workload.release.clear()
        await run.workload.holding.wait()
        assert run.coordinator.fleet.policy_version == 2
        assert broken.calls.count("verify") == 2, "the second step's push went without it"
        await run.until_true(lambda: "rollout-1" in run.coordinator.fleet.traffic_ids())
        assert broken.served_version == 2
        run.workload.release.set()
        await run.until(RunState.FINISHED)
