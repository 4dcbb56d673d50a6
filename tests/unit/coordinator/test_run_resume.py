"""A coordinator that is started again beside gangs that have trained, over scripted gangs and servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.states import RunState

from shoal.errors import InternalError
from tests.helpers.run_fakes import KINDS, RunHarness, ScriptedConnector

S = RunState
ADAPTIVE = {"estimator": "gae", "kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 100}


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def temporary_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def collected(run: RunHarness) -> list[str]:
    return [entry for entry in run.log if entry.startswith("collect")]


async def train(folder: Path, connector: ScriptedConnector | None = None, *, until: RunState = S.FINISHED, **sections: Any) -> RunHarness:  # noqa: ANN401
    """Run a coordinator to its end, beside the services of an earlier one if a connector is given."""
    async with RunHarness(folder, connector=connector, **sections) as run:
        run.log.clear()
        run.join_all()
        await run.until(until)
    return run


async def test_run_writes_its_state_after_every_step(tmp_path: Path) -> None:
    await train(tmp_path, run={"steps": 2}, algorithm=ADAPTIVE)
    state = read_state(tmp_path)
    assert (state["schema_version"], state["run_id"], state["next"]) == (1, "test", None)
    current = state["current"]
    assert (current["step"], current["policy_version"], current["prompts"]) == (2, 2, {"epoch": 0, "index": 4})
    assert current["gangs"] == {"actor": {"incarnation": "a", "step": 2}, "critic": {"incarnation": "a", "step": 2}}
    # A KL of 1 at a target of 0.5: 20 % x 4 samples / 100 more, twice.
    assert current["kl"]["kl_coef"] == pytest.approx(0.01 * 1.008**2)
    assert current["kl"]["kl_loss_coef"] == 0.0
    assert temporary_files(tmp_path) == []


async def test_run_continues_exactly_where_an_earlier_coordinator_ended(tmp_path: Path) -> None:
    first = await train(tmp_path, run={"steps": 2}, algorithm=ADAPTIVE)
    second = await train(tmp_path, first.connector, run={"steps": 4}, algorithm=ADAPTIVE)
    assert collected(second) == ["collect 3 at version 2", "collect 4 at version 3"]
    whole = await train(tmp_path / "whole", run={"steps": 4}, algorithm=ADAPTIVE)
    assert second.connector.actor.kl_coefs == whole.connector.actor.kl_coefs
    assert read_state(tmp_path) == read_state(tmp_path / "whole")


async def test_run_continues_where_updates_were_not_applied(tmp_path: Path) -> None:
    connector = ScriptedConnector()
    connector.actor.applies = connector.critic.applies = False
    await train(tmp_path, connector, run={"steps": 2})
    connector.actor.applies = connector.critic.applies = True
    third = await train(tmp_path, connector, run={"steps": 3})
    assert collected(third) == ["collect 3 at version 0"]
    assert read_state(tmp_path)["current"]["gangs"]["actor"]["step"] == 1


async def test_run_generates_the_step_again_that_no_gang_has_committed(tmp_path: Path) -> None:
    first = await train(tmp_path, run={"steps": 1})
    for gang in (first.connector.actor, first.connector.critic):
        gang.fail["update 2"] = InternalError("killed")
    await train(tmp_path, first.connector, run={"steps": 3}, until=S.FAILED)
    assert read_state(tmp_path)["next"]["step"] == 2
    for gang in (first.connector.actor, first.connector.critic):
        gang.fail.clear()
    third = await train(tmp_path, first.connector, run={"steps": 3})
    assert collected(third) == ["collect 2 at version 1", "collect 3 at version 2"]
    once, again = (batch for batch in first.connector.critic.batches if batch.step == 2)
    assert once.batch_id != again.batch_id
    assert once.ranks == again.ranks, "told apart by their id alone: the columns of the first are gone"


async def test_run_does_not_train_a_step_twice_that_the_gangs_have_committed(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 3}) as first:
        # Killed in the push, after both updates.
        gate = asyncio.Event()
        first.join_all()
        await first.until(S.WAITING_FOR_SERVICES)
        first.connector.sinks["rollout-0:1"].faults["verify"] = [gate]
        await first.until_true(lambda: len(first.workload.queue.acked) == 2)
        first.cancel_run()
        gate.set()
        await first.until(S.STOPPED)
    assert (read_state(tmp_path)["current"]["step"], read_state(tmp_path)["next"]["step"]) == (0, 1)
    second = await train(tmp_path, first.connector, run={"steps": 3})
    assert collected(second) == ["collect 2 at version 1", "collect 3 at version 2"]


@pytest.mark.parametrize(("late", "versions"), [("critic", (2, 1)), ("actor", (1, 2))])
async def test_run_goes_on_behind_a_step_that_one_gang_has_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, late: str, versions: tuple[int, int]
) -> None:
    connector = (await train(tmp_path, run={"steps": 1})).connector
    other, gang = (connector.actor, connector.critic) if late == "critic" else (connector.critic, connector.actor)
    gate = gang.gates["update 2"] = asyncio.Event()
    gang.fail["update 2"] = InternalError("killed")
    async with RunHarness(tmp_path, connector=connector, run={"steps": 3}) as second:
        second.join_all()
        await second.until_true(lambda: other.step == 2)
        gate.set()
        await second.until(S.FAILED)
    gang.fail.clear()
    assert (connector.actor.step, connector.critic.step) == versions
    third = await train(tmp_path, connector, run={"steps": 3})
    assert collected(third) == [f"collect 3 at version {versions[0]}"]
    assert (connector.actor.step, connector.critic.step) == (versions[0] + 1, versions[1] + 1)
    assert "update_may_be_missing" in caplog.text


async def test_run_with_fresh_gangs_starts_whatever_the_file_says(tmp_path: Path) -> None:
    await train(tmp_path, run={"steps": 2})
    again = await train(tmp_path, run={"steps": 1})
    assert collected(again) == ["collect 1 at version 0"]
    assert read_state(tmp_path)["current"]["step"] == 1


async def test_run_with_fresh_gangs_starts_even_where_the_earlier_ones_had_learned_nothing(tmp_path: Path) -> None:
    connector = ScriptedConnector()
    connector.actor.applies = connector.critic.applies = False
    await train(tmp_path, connector, run={"steps": 2})
    async with RunHarness(tmp_path, connector=connector, run={"steps": 1}) as again:
        again.log.clear()
        for service_id in KINDS:
            again.join(service_id, incarnation="b")
        await again.until(S.FINISHED)
    assert collected(again) == ["collect 1 at version 0"]


@pytest.mark.parametrize("steps", [(3, 3), (2, 4), (1, 2), (5, 5)])
async def test_run_refuses_gangs_of_which_it_knows_nothing(tmp_path: Path, steps: tuple[int, int]) -> None:
    first = await train(tmp_path, run={"steps": 2})
    first.connector.actor.step, first.connector.critic.step = steps
    refused = await train(tmp_path, first.connector, run={"steps": 9}, until=S.FAILED)
    error = str(refused.coordinator.run.progress.error)
    assert f"{{'actor': {steps[0]}, 'critic': {steps[1]}}}" in error
    assert "says {'actor': 2, 'critic': 2}" in error
    assert "start all gangs again" in error
    assert refused.log == []


@pytest.mark.parametrize("steps", [(3, 3), (1, 3), (0, 1)])
async def test_run_refuses_gangs_that_are_neither_before_nor_behind_the_step_that_was_cut_short(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    connector = (await train(tmp_path, run={"steps": 1})).connector
    connector.actor.fail["update 2"] = connector.critic.fail["update 2"] = InternalError("killed")
    await train(tmp_path, connector, run={"steps": 3}, until=S.FAILED)
    connector.actor.step, connector.critic.step = steps
    refused = await train(tmp_path, connector, run={"steps": 9}, until=S.FAILED)
    assert "says {'actor': 1, 'critic': 1} or {'actor': 2, 'critic': 2}" in str(refused.coordinator.run.progress.error)


async def test_run_refuses_trained_gangs_of_another_kind_of_run(tmp_path: Path) -> None:
    first = await train(tmp_path, run={"steps": 2})
    refused = await train(tmp_path, first.connector, estimator="grpo", until=S.FAILED)
    assert "the gangs have committed different steps" in str(refused.coordinator.run.progress.error)


async def test_run_refuses_trained_gangs_without_a_state(tmp_path: Path) -> None:
    first = await train(tmp_path, run={"steps": 2})
    (tmp_path / "state.json").unlink()
    refused = await train(tmp_path, first.connector, until=S.FAILED)
    assert "state.json is missing or of another run" in str(refused.coordinator.run.progress.error)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"extra": 1}, "extra"),
        ({"current": {"step": -1}}, "current.step"),
        ({"current": None}, "current"),
        ({"current": {"policy_version": 7}}, "current: Value error, policy_version is 7"),
    ],
)
async def test_run_refuses_a_state_that_it_cannot_read(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    first = await train(tmp_path, run={"steps": 1})
    state = read_state(tmp_path)
    for key, value in change.items():
        state[key] = state[key] | value if isinstance(value, dict) else value
    (tmp_path / "state.json").write_text(json.dumps(state))
    refused = await train(tmp_path, first.connector, until=S.FAILED)
    error = str(refused.coordinator.run.progress.error)
    assert f"state.json cannot be read as the state of a run ({problem}" in error
    assert "start the gangs again" in error


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
async def test_run_refuses_a_state_with_numbers_that_are_not_finite(tmp_path: Path, number: str) -> None:
    first = await train(tmp_path, run={"steps": 1})
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text.replace('"kl_coef": 0.01', f'"kl_coef": {number}'))
    refused = await train(tmp_path, first.connector, until=S.FAILED)
    assert "current.kl.kl_coef" in str(refused.coordinator.run.progress.error)
