"""Opening the route, taking revisions through their checks, gates, draining, and going on after a restart in every stage."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.rewards.audit_log import LogEntry
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_stages import RouteStage

from shoal.conformance import Check, CheckLevel
from shoal.errors import ConfigError, InvalidRequestError, NotFoundError, StateError, UnavailableError
from shoal.telemetry.metrics import sample_value
from tests.helpers.lifecycle_fakes import FixedProbes, LifecycleHarness, passing, scorer
from tests.helpers.route_fakes import WHO, WHY, add_in

GATES = Gates(min_samples=50, max_error_share=0.1)


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    """The fields of each event of a name."""
    return [record.__dict__["shoal_fields"] for record in caplog.records if record.getMessage() == event]


async def test_open_activates_what_the_configuration_asks_for_and_pins_it(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        routes.servers.join("reward-0", scorer(version="1.9", fingerprint="old"), scorer(version="1.10", fingerprint="new"))
        await routes.open()
        active = routes.book.active
        assert (active.number, active.label) == (1, "configuration")
        assert active.components == (RouteComponent(scorer="math", version="1.10", fingerprint="new", timeout_s=7.0),)
        assert [entry.action for entry in routes.book.entries(10)] == ["open", "add", "check", "ready", "activate"]
        assert sample_value("shoal_coordinator_route_revision") == 1


async def test_open_waits_for_servers_of_all_scorers_and_says_so(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, sources={"a": "math", "b": "code"}, patience_s=5.0) as routes:
        routes.servers.join("reward-0", scorer())
        opening = asyncio.create_task(routes.open())
        await routes.until_true(lambda: bool(routes.waits.current()))
        assert routes.waits.current()[0].what == "a reward server that offers code, math"
        routes.servers.join("reward-1", scorer("code", "3", "c"))
        await opening
        assert [(each.scorer, each.version, each.sources) for each in routes.book.active.components] == [
            ("code", "3", ("b",)),
            ("math", "1", ("a",)),
        ]


async def test_open_ignores_a_server_that_has_not_said_what_it_offers(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        member = routes.servers.join("reward-0", scorer(), suspect=True)
        opening = asyncio.create_task(routes.open())
        await routes.until_true(lambda: bool(routes.waits.current()))
        assert routes.book.active_number == 0
        member.suspect = False
        routes.servers.join("reward-1")
        await opening


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"scorer": "maths"}, "reward.scorer cannot score: no reward server offers scorer 'maths'; there is: math 1 .reward-0"),
        ({"version": "2"}, "no reward server offers scorer 'math' version '2'; there is: math 1 .reward-0"),
        ({"sources": {"a": "math", "b": "nope"}}, "reward.sources of b: cannot score: no reward server offers scorer 'nope'"),
    ],
)
async def test_open_names_a_scorer_that_nobody_offers(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    async with LifecycleHarness(tmp_path, **reward) as routes:
        routes.servers.join("reward-0", scorer())
        with pytest.raises(NotFoundError, match=message):
            await routes.open()
        assert routes.book.records() == ()


async def test_open_says_that_no_server_came(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.05) as routes:
        with pytest.raises(UnavailableError, match="there is: none at all: start a reward server"):
            await routes.open()


async def test_open_refuses_two_codes_under_one_version(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.05) as routes:
        routes.servers.join("reward-0", scorer(fingerprint="a"))
        routes.servers.join("reward-1", scorer(fingerprint="b"))
        with pytest.raises(ConfigError, match=r"other code under the same version of math@1 \(reward-0: a; reward-1: b\)"):
            await routes.open()


async def test_open_goes_by_the_log_and_warns_of_another_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
    async with LifecycleHarness(tmp_path) as routes:
        await routes.open()
    assert events(caplog, "configured_reward_not_active") == []
    async with LifecycleHarness(tmp_path, scorer="other") as routes:
        await routes.open()  # no server is there: the log needs none
        assert routes.book.active.components[0].scorer == "math"
    (warning,) = events(caplog, "configured_reward_not_active")
    assert (warning["active"], warning["configured"]) == (1, ["other"])


@pytest.mark.parametrize("stage", [RouteStage.REGISTERED, RouteStage.CHECKED, RouteStage.READY])
async def test_open_begins_anew_where_nothing_was_active_yet(tmp_path: Path, stage: RouteStage) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await add_in(routes.book, stage, fingerprint="gone")
        await routes.begin()
        assert (routes.book.active_number, routes.book.stage(1)) == (2, RouteStage.RETIRED)
        assert routes.book.active.components[0].fingerprint == "f1"


async def test_new_revision_is_checked_and_warmed_up(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        routes.servers.join("reward-2", scorer("code", "2", "c"), scorer("other", "1", "o"))
        number = await routes.add(RouteComponent(scorer="math"), RouteComponent(scorer="code", weight=0.5, is_required=False))
        record = await routes.until(number, RouteStage.READY)
        assert [(each.scorer, each.version, each.fingerprint) for each in record.revision.components] == [
            ("math", "1", "f1"),
            ("code", "2", "c"),
        ]
        assert routes.check.asked == [(("math", "1"),), (("code", "2"),), (("code", "2"),)]
        assert routes.calls.asked == [("math", "1", 4), ("code", "2", 4)]
        assert [entry.why for entry in routes.book.entries(2)] == ["passed by reward-0, reward-1, reward-2", "8 scores of the probe set"]
        assert routes.book.active_number == 1


async def test_new_revision_is_tried_on_rows_of_its_sources(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, sources={"a": "math", "b": "math"}) as routes:
        await routes.begin()
        number = await routes.add(RouteComponent(scorer="math", sources=("a",)), RouteComponent(scorer="math", sources=("b",), weight=2.0))
        await routes.until(number, RouteStage.READY)
        assert sorted(map(sorted, routes.probes.asked)) == [["a"], ["a", "b"], ["b"]]


async def test_new_revision_without_a_sample_to_try_is_ready(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, probes=FixedProbes(0)) as routes:
        await routes.begin()
        await routes.until(await routes.add(), RouteStage.READY)
        assert routes.calls.asked == []


async def test_new_revision_waits_for_its_servers(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        number = await routes.add(RouteComponent(scorer="code"))
        await routes.book.wait_for_change(0.05)
        assert routes.book.stage(number) is RouteStage.REGISTERED
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        await routes.until(number, RouteStage.READY)


async def test_new_revision_is_rejected_when_nobody_offers_its_scorer(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.1) as routes:
        await routes.begin()
        problem = (await routes.until(await routes.add(RouteComponent(scorer="code")), RouteStage.REJECTED)).problem
        assert problem == "no reward server offers scorer 'code'; there is: math 1 (reward-0)"
        assert routes.shadow.forgotten == [2]


async def test_new_revision_is_rejected_by_a_failed_check(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        bad = Check(name="deterministic", scorer="math@1", level=CheckLevel.FAILURE, detail="0.1, then 0.2", fix="seed it")
        routes.check.failures[("math", "1")] = bad
        record = await routes.until(await routes.add(), RouteStage.REJECTED)
        assert record.problem == "server reward-0: math@1 failed the check 'deterministic': 0.1, then 0.2; seed it"
        assert routes.calls.asked == []


@pytest.mark.parametrize(("num_errors", "stage"), [(2, RouteStage.READY), (3, RouteStage.REJECTED)])
async def test_new_revision_is_rejected_above_the_share_of_errors(tmp_path: Path, num_errors: int, stage: RouteStage) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.calls.errors["math"] = (num_errors, "ValueError: no answer")
        record = await routes.until(await routes.add(), stage)
        if stage is RouteStage.REJECTED:
            assert record.problem == (
                "math@1 (reward-0) could not score 3 of 4 samples of the probe set, the first for: ValueError: no answer"
            )


async def test_new_revision_is_rejected_when_its_servers_leave_before_the_warm_up(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.1) as routes:
        await routes.begin()
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        routes.check.gate = asyncio.Event()
        number = await routes.add(RouteComponent(scorer="code"))
        await routes.check.entered.wait()
        routes.servers.leave("reward-1")
        routes.check.gate.set()
        problem = (await routes.until(number, RouteStage.REJECTED)).problem
        assert problem == "no server offered code@2 with code c for 0.1 s; there is: math 1 (reward-0)"


async def test_new_revision_may_not_bring_other_code_under_an_open_version(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.1) as routes:
        await routes.begin()
        routes.servers.leave("reward-0")
        routes.servers.join("reward-1", scorer(fingerprint="f2"))
        problem = (await routes.until(await routes.add(), RouteStage.REJECTED)).problem
        assert problem is not None
        assert problem.startswith("the servers of math@1 run other code than the revisions that are open (reward-1: f2; they have f1)")


async def test_other_code_under_the_same_version_is_told_once_and_gets_no_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.servers.join("reward-1", scorer(fingerprint="f2"))
        number = await routes.add()
        record = await routes.until(number, RouteStage.READY)
        assert record.revision.components[0].fingerprint == "f1"
        assert routes.check.asked == [(("math", "1"),)], "the server with other code is not asked"
        assert [offer.member.info.service_id for offer in routes.lifecycle.servers_with_other_code()] == ["reward-1"]
    assert [fields["service_id"] for fields in events(caplog, "other_code_under_the_same_version")] == ["reward-1"]


async def test_retiring_ends_the_checks_of_a_revision(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.check.gate = asyncio.Event()
        number = await routes.add()
        await routes.check.entered.wait()
        await routes.lifecycle.retire(number, who=WHO, why=WHY)
        routes.check.gate.set()
        routes.check.gate = None
        await routes.until(await routes.add(), RouteStage.READY)
        assert routes.book.stage(number) is RouteStage.RETIRED


@pytest.mark.parametrize(
    ("sources", "components", "message"),
    [
        ({}, [RouteComponent(scorer="math", sources=("a",))], "rows of sources that no component names would have no reward"),
        ({}, [RouteComponent(scorer="math", sources=("",))], "rows of sources that no component names would have no reward"),
        ({}, [RouteComponent(scorer="x", is_required=False)], "would have no reward"),
        ({"a": "math", "b": "math"}, [RouteComponent(scorer="math", sources=("a",))], "rows of source 'b' would have no reward"),
        ({"a": "math"}, [RouteComponent(scorer="math", sources=("a", "c"))], "names source 'c', which no row has; reward.sources has a"),
    ],
)
async def test_a_revision_must_reward_every_row(
    tmp_path: Path, sources: dict[str, str], components: list[RouteComponent], message: str
) -> None:
    async with LifecycleHarness(tmp_path, sources=sources) as routes:
        await routes.begin()
        with pytest.raises(InvalidRequestError, match=message):
            await routes.add(*components)


async def test_a_revision_must_name_the_parts_that_an_estimator_reads(tmp_path: Path) -> None:
    weights = {"correct": 1.0, "form": 0.5}
    async with LifecycleHarness(tmp_path, algorithm={"estimator": "gdpo", "kl_in": "none"}, weights=weights) as routes:
        await routes.begin()
        with pytest.raises(InvalidRequestError, match=r"gdpo needs the parts of reward.weights, and the route does not name 'form'"):
            await routes.add(RouteComponent(scorer="math", parts={"correct": 1.0}))
        await routes.add(RouteComponent(scorer="math", parts={"correct": 1.0}), RouteComponent(scorer="form"))


async def test_a_revision_cannot_be_added_before_the_run_has_begun(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        with pytest.raises(StateError, match="the run has not begun"):
            await routes.add()


async def test_addresses_are_asked_and_a_silent_one_is_named_in_the_rejection(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path, ready_timeout_s=0.2) as routes:
        await routes.begin()
        with pytest.raises(InvalidRequestError, match="address 'nowhere' is not host:port"):
            await routes.add(addresses=["nowhere"])
        number = await routes.add(RouteComponent(scorer="code"), addresses=["far:1"])
        await routes.until_true(lambda: routes.statics.addresses == {"far:1"})
        problem = (await routes.until(number, RouteStage.REJECTED)).problem
        assert problem == "no reward server offers scorer 'code'; there is: math 1 (reward-0)"
        await routes.until_true(lambda: routes.statics.addresses == set())


async def test_activation_needs_a_server_of_every_component(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        number = await routes.add(RouteComponent(scorer="code"))
        await routes.until(number, RouteStage.READY)
        routes.servers.leave("reward-1")
        with pytest.raises(StateError, match=r"no server offers code@2 with code c .there is: math 1 .reward-0.*start one and try again"):
            await routes.lifecycle.activate(number, None, when_gates_pass=False, who=WHO, why=WHY)
        assert routes.book.active_number == 1
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        await routes.lifecycle.activate(number, None, when_gates_pass=False, who=WHO, why=WHY)
        routes.servers.leave("reward-0")
        with pytest.raises(StateError, match=r"revision 1 .* no server offers math@1"):
            await routes.lifecycle.rollback(who=WHO, why=WHY)
        routes.servers.join("reward-0", scorer())
        assert (await routes.lifecycle.rollback(who=WHO, why=WHY)).number == 1


async def test_the_old_revision_is_drained_when_its_last_group_is_done(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        number = await routes.add()
        await routes.until(number, RouteStage.READY)
        pin = routes.book.pin()
        await routes.lifecycle.activate(number, None, when_gates_pass=False, who=WHO, why=WHY)
        assert routes.book.stage(1) is RouteStage.DRAINING
        with pytest.raises(StateError, match="cannot go from draining to retired"):
            await routes.lifecycle.retire(1, who=WHO, why=WHY)
        pin.release()
        await routes.until(1, RouteStage.DRAINED)
        await routes.lifecycle.retire(1, who=WHO, why=WHY)


async def test_activation_by_gates_names_each_that_fails(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        number = await routes.add()
        await routes.until(number, RouteStage.READY)
        await routes.lifecycle.shadow(number, 1.0, who=WHO, why=WHY)
        with pytest.raises(StateError, match=r"revision 2 .* does not pass: min_samples: .*; max_error_share:"):
            await routes.lifecycle.activate(number, GATES, when_gates_pass=False, who=WHO, why=WHY)
        routes.shadow.comparisons[number] = passing(number)
        await routes.lifecycle.activate(number, GATES, when_gates_pass=False, who=WHO, why=WHY)
        assert routes.book.active_number == number
        # The old revision may have been drained already.
        activated = [entry for entry in routes.book.entries(2) if entry.revision == number]
        assert activated[-1].detail == {
            "gates": {"min_samples": 50, "min_rank_correlation": None, "max_p99_ms": None, "max_error_share": 0.1}
        }


async def test_gates_are_looked_at_when_nothing_can_come_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with the revision that was active when somebody asked is of no use once another one is."""
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        shadow, other = await routes.add(), await routes.add()
        for number in (shadow, other):
            await routes.until(number, RouteStage.READY)
        await routes.lifecycle.shadow(shadow, 1.0, who=WHO, why=WHY)
        routes.shadow.comparisons[shadow] = passing(shadow)
        writing, may_write = asyncio.Event(), threading.Event()
        loop, append = asyncio.get_running_loop(), routes.book._log.append

        def slow_append(entry: LogEntry) -> None:
            loop.call_soon_threadsafe(writing.set)
            may_write.wait(10.0)
            append(entry)

        monkeypatch.setattr(routes.book._log, "append", slow_append)
        first = asyncio.create_task(routes.lifecycle.activate(other, None, when_gates_pass=False, who=WHO, why=WHY))
        await writing.wait()
        second = asyncio.create_task(routes.lifecycle.activate(shadow, GATES, when_gates_pass=False, who=WHO, why=WHY))
        await asyncio.sleep(0)
        may_write.set()
        await first
        with pytest.raises(StateError, match="does not pass: min_samples: 0 samples"):
            await second
        assert routes.book.active_number == other


async def test_armed_gates_activate_as_soon_as_they_pass(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        number = await routes.add()
        await routes.until(number, RouteStage.READY)
        with pytest.raises(InvalidRequestError, match="when_gates_pass is true, but gates is null"):
            await routes.lifecycle.activate(number, None, when_gates_pass=True, who=WHO, why=WHY)
        with pytest.raises(StateError, match="is ready; arm needs one that is shadow"):
            await routes.lifecycle.activate(number, GATES, when_gates_pass=True, who=WHO, why=WHY)
        await routes.lifecycle.shadow(number, 1.0, who=WHO, why=WHY)
        await routes.lifecycle.activate(number, GATES, when_gates_pass=True, who="ci", why="nightly")
        assert len(routes.lifecycle.problems(routes.book.record(number))) == 2
        routes.shadow.comparisons[number] = passing(number)
        await routes.until(number, RouteStage.ACTIVE)
        entries = [entry for entry in routes.book.entries(10) if entry.action == "activate" and entry.revision == number]
        assert [(entry.who, entry.why) for entry in entries] == [("ci", "its gates have passed: nightly")]


async def test_armed_gates_wait_for_servers(tmp_path: Path) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        number = await routes.add(RouteComponent(scorer="code"))
        await routes.until(number, RouteStage.READY)
        await routes.lifecycle.shadow(number, 1.0, who=WHO, why=WHY)
        routes.servers.leave("reward-1")
        routes.shadow.comparisons[number] = passing(number)
        await routes.lifecycle.activate(number, GATES, when_gates_pass=True, who=WHO, why=WHY)
        await routes.book.wait_for_change(0.1)
        assert routes.book.active_number == 1
        routes.servers.join("reward-1", scorer("code", "2", "c"))
        await routes.until(number, RouteStage.ACTIVE)


@pytest.mark.parametrize("stage", list(RouteStage))
async def test_coordinator_that_starts_again_goes_on_in_every_stage(tmp_path: Path, stage: RouteStage) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.check.gate = routes.calls.gate = asyncio.Event()
        number = await _bring_to(routes, stage)
        before = routes.book.active_number
        await routes.start_again()
        assert (routes.book.stage(number), routes.book.active_number) == (stage, before)
        routes.check.gate = routes.calls.gate = None
        await routes.open()
        after = {RouteStage.REGISTERED: RouteStage.READY, RouteStage.CHECKED: RouteStage.READY, RouteStage.DRAINING: RouteStage.DRAINED}
        record = await routes.until(number, after.get(stage, stage))
        assert routes.book.active_number == before
        if stage is RouteStage.SHADOW:
            assert (record.shadow_share, record.gates, record.armed_by) == (0.5, GATES, ("ci", "nightly"))
            routes.shadow.comparisons[number] = passing(number)
            await routes.until(number, RouteStage.ACTIVE)


async def _bring_to(routes: LifecycleHarness, stage: RouteStage) -> int:
    """A revision in a stage, by the lifecycle itself while it is being checked."""
    if stage is RouteStage.REGISTERED:
        number = await routes.add()
        await routes.check.entered.wait()
    elif stage is RouteStage.CHECKED:
        routes.check.gate = None
        number = await routes.add()
        await routes.calls.entered.wait()
    elif stage is RouteStage.DRAINING:
        number = 1
        routes.book.pin()
        await routes.book.activate(await add_in(routes.book, RouteStage.READY), who=WHO, why=WHY)
    else:
        number = 1 if stage is RouteStage.ACTIVE else await add_in(routes.book, stage)
    if stage is RouteStage.SHADOW:
        await routes.lifecycle.activate(number, GATES, when_gates_pass=True, who="ci", why="nightly")
    return number


async def test_disk_that_fails_keeps_a_revision_where_it_is_until_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LifecycleHarness(tmp_path) as routes:
        await routes.begin()
        routes.check.gate = asyncio.Event()
        number = await routes.add()
        await routes.check.entered.wait()
        failed = asyncio.Event()
        append = routes.book._log.append
        loop = asyncio.get_running_loop()

        def fail(entry: object) -> None:
            loop.call_soon_threadsafe(failed.set)
            raise StateError("cannot write: Input/output error")

        monkeypatch.setattr(routes.book._log, "append", fail)
        routes.check.gate.set()
        await failed.wait()
        assert routes.book.stage(number) is RouteStage.REGISTERED
        monkeypatch.setattr(routes.book._log, "append", append)
        await routes.until(number, RouteStage.READY)
