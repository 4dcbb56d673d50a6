"""Servers compared with the trainer: what is found, what becomes of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shoal_coordinator.audit import agreement, compare_digests
from shoal_coordinator.audit_report import ServerAudit
from shoal_coordinator.rest_models import Command, ServerAuditModel
from shoal_coordinator.states import RunState

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, ShoalError, StateError, UnavailableError
from shoal.telemetry.metrics import sample_value
from shoal.types import PieceDigests, TokenScores
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from tests.helpers.coordinator_fakes import make_completion
from tests.helpers.layouts import decoder_shapes, decoder_sink, fsdp_source
from tests.helpers.push_fakes import piece_digests
from tests.helpers.run_fakes import RunHarness

SETTINGS = PushSection()


def make_plan() -> ServerPlan:
    source, sink = fsdp_source(decoder_shapes(tied=False), 2), decoder_sink("a", 2)
    return plan_server(source, sink, bucket_bytes=SETTINGS.bucket_bytes, transport="auto")


def with_changed(digests: Sequence[PieceDigests], *places: tuple[int, int]) -> list[PieceDigests]:
    """Other digests at (pair, piece)."""
    changed = list(digests)
    for pair, piece in places:
        xxh3 = list(changed[pair].xxh3)
        xxh3[piece] += 1
        changed[pair] = replace(changed[pair], xxh3=tuple(xxh3))
    return changed


def test_audit_of_equal_weights_counts_parameters_and_pieces() -> None:
    plan = make_plan()
    digests = piece_digests(plan, 1)
    audit = compare_digests("a", plan, digests, digests[::-1])
    num_parameters = sum(len(worker.parameters) for worker in decoder_sink("a", 2).workers)
    assert audit == ServerAudit(server_id="a", num_parameters=num_parameters, num_pieces=plan.num_pieces)
    assert (audit.differs, audit.result) == (False, "equal")


def test_audit_names_the_first_parameter_that_differs_in_the_plans_order() -> None:
    plan = make_plan()
    digests = piece_digests(plan, 1)
    audit = compare_digests("a", plan, digests, with_changed(digests, (3, 5), (0, 4), (0, 2)))
    rank, worker_rank = plan.pairs()[0]
    piece = [piece for bucket in plan.buckets(rank, worker_rank) for piece in bucket.pieces][2]
    assert audit.first_difference == f"{piece.parameter} of worker {worker_rank} (from {piece.source_name} of rank {rank})"
    assert (audit.num_differing, audit.result) == (3, "differs")


@pytest.mark.parametrize("end", ["trainer", "server"])
@pytest.mark.parametrize("missing", ["pair", "piece"])
def test_audit_without_a_digest_for_every_piece_knows_nothing(end: str, missing: str) -> None:
    plan = make_plan()
    digests = piece_digests(plan, 1)
    fewer = list(digests[:-1]) if missing == "pair" else [*digests[:-1], replace(digests[-1], xxh3=digests[-1].xxh3[1:])]
    audit = compare_digests("a", plan, fewer if end == "trainer" else digests, fewer if end == "server" else digests)
    rank, worker_rank = plan.pairs()[-1]
    assert audit.error is not None
    assert audit.error.startswith(f"the {end} digested ")
    assert audit.error.endswith(f"pieces from rank {rank} to worker {worker_rank}")
    assert audit.result == "unknown"


def test_agreement_is_the_largest_difference_and_the_share_of_equal_choices() -> None:
    completions = [
        replace(make_completion(0, [5, 6, 7]), rollout_logprobs=np.array([-0.5, -1.0, -2.0], np.float32)),
        make_completion(0, []),
        replace(make_completion(0, [8]), rollout_logprobs=np.array([-0.25], np.float32)),
    ]
    scores = [
        TokenScores(logprobs=(-0.5, -1.5, -2.25), greedy_ids=(5, 9, 7)),
        TokenScores(logprobs=(), greedy_ids=()),
        TokenScores(logprobs=(-0.375,), greedy_ids=(8,)),
    ]
    found = agreement(completions, scores)
    assert (found.num_tokens, found.max_logprob_difference, found.num_equal_greedy, found.greedy_share) == (4, 0.5, 3, 0.75)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf])
def test_agreement_does_not_pass_over_a_log_probability_that_is_not_finite(logprob: float) -> None:
    completion = replace(make_completion(0, [5, 6]), rollout_logprobs=np.array([-0.5, logprob], np.float32))
    found = agreement([completion], [TokenScores(logprobs=(-0.5, -0.5), greedy_ids=(5, 6))])
    assert found.max_logprob_difference == math.inf


async def paused_run(run: RunHarness) -> None:
    """After the first step."""
    run.workload.hold_at = 1
    run.join_all()
    await run.workload.holding.wait()
    run.coordinator.backend.command(Command.PAUSE)
    run.workload.release.set()
    await run.until(RunState.PAUSED)


async def verify_one(run: RunHarness) -> ServerAuditModel:
    (server,) = (await run.coordinator.backend.verify_weights(5.0)).servers
    return server


async def test_verify_compares_while_the_run_is_paused(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        audit = await run.coordinator.backend.verify_weights(5.0)
        (server,) = audit.servers
        assert (audit.policy_version, audit.is_equal, server.num_parameters, server.num_pieces) == (1, True, 1, 1)
        assert server.probe is not None
        # The scripted server answers its greedy id and another one, at -1; the scripted trainer says -1.5.
        assert (server.probe.num_tokens, server.probe.max_logprob_difference, server.probe.greedy_share) == (8, 0.5, 0.5)
        assert run.coordinator.machine.state is RunState.PAUSED
        status = run.coordinator.backend.status()
        assert status.pushes is not None
        assert status.pushes.last_audit == "equal"


async def test_verify_asks_the_trainer_for_no_more_scores_than_it_gives_in_a_call(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, push={"audit_prompts": 40}) as run:
        run.join("rollout-1")
        await paused_run(run)
        audit = await run.coordinator.backend.verify_weights(5.0)
    assert [server.probe_error for server in audit.servers] == [None, None]
    assert [server.probe and server.probe.num_tokens for server in audit.servers] == [80, 80]
    assert run.log.count("actor score") == 2


async def test_verify_fences_what_differs_repairs_it_with_everything_and_lets_it_back(tmp_path: Path) -> None:
    before = sample_value("shoal_push_audits_total", {"result": "differs"}) or 0.0
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        sink, gate = run.connector.sink("rollout-0:1"), asyncio.Event()
        sink.corrupt = {"w": 1}
        sink.faults["prepare"] = [gate]
        server = await verify_one(run)
        assert (server.result, server.num_differing) == ("differs", 1)
        assert server.first_difference == "w of worker 0 (from w of rank 0)"
        assert run.coordinator.fleet.traffic_ids() == ("reward-0",)
        (rollout,) = [service for service in run.coordinator.backend.services() if service.kind == "rollout"]
        assert (rollout.state, rollout.policy_version) == ("fenced", 1)
        assert rollout.fenced_because == "its weights differ from the trainer's in w of worker 0 (from w of rank 0)"
        with pytest.raises(StateError, match="no rollout server serves policy version 1 now"):
            await run.coordinator.backend.verify_weights(5.0)
        gate.set()
        await run.until_true(lambda: "rollout-0" in run.coordinator.fleet.traffic_ids())
        assert (await verify_one(run)).result == "equal"
        (repair,) = run.coordinator.backend.pushes(1)
        assert (repair.reason, repair.policy_version, [server.dense for server in repair.server_reports]) == ("catch_up", 1, [True])
        assert [audit.is_equal for audit in run.coordinator.backend.audits(10)] == [False, True]
        run.coordinator.backend.command(Command.RESUME)
        await run.until(RunState.FINISHED)
    assert sample_value("shoal_push_audits_total", {"result": "differs"}) == before + 1


async def test_verify_is_refused_before_the_first_push(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        with pytest.raises(StateError, match="no weight push has been committed yet"):
            await run.coordinator.backend.verify_weights(5.0)


async def test_verify_waits_for_the_weights_and_no_longer_than_asked(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        gate = run.connector.actor.gates["update 2"] = asyncio.Event()
        run.join_all()
        await run.until_true(lambda: "actor update 2" in run.log)
        with pytest.raises(DeadlineError, match=r"did not end within 0\.05 s"):
            await run.coordinator.backend.verify_weights(0.05)
        waiting = asyncio.create_task(run.coordinator.backend.verify_weights(5.0))
        await asyncio.sleep(0)
        assert run.connector.source_end.calls.count("digest") == 0
        gate.set()
        assert (await waiting).policy_version == 2
        await run.until(RunState.FINISHED)


async def test_verify_goes_on_after_the_run(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.join_all()
        await run.until(RunState.FINISHED)
        assert (await verify_one(run)).result == "equal"


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
async def test_audit_runs_after_every_so_many_pushes(tmp_path: Path, every: int, expected: list[int]) -> None:
    async with RunHarness(tmp_path, run={"steps": 4}, push={"audit_every": every}) as run:
        run.join_all()
        await run.until(RunState.FINISHED)
    assert [audit.policy_version for audit in run.coordinator.backend.audits(10)] == expected
    assert run.log.count("actor score") == len(expected)


async def test_audit_that_finds_a_difference_repairs_it_before_the_next_step(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 3}, push={"audit_every": 1}) as run:
        run.join_all()
        sink = run.connector.sink("rollout-0:1")
        run.connector.actor.gates["update 2"] = gate = asyncio.Event()
        await run.until_true(lambda: "actor update 2" in run.log)
        sink.corrupt = {"w": 1}
        gate.set()
        await run.until(RunState.FINISHED)
    assert [audit.is_equal for audit in run.coordinator.backend.audits(10)] == [True, False, True]
    pushes = [(push.policy_version, push.reason) for push in run.coordinator.backend.pushes(10)]
    assert pushes == [(1, "step"), (2, "step"), (2, "catch_up"), (3, "step")]


async def test_a_server_that_differs_gets_everything_even_if_the_next_step_is_faster_than_its_repair(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}, push={"audit_every": 1}) as run:
        sink = run.connector.sink("rollout-1:1")
        sink.faults["prepare"] = [None, StateError("busy")]
        sink.corrupt = {"w": 1}
        sink.sticky = 1
        run.join("rollout-1")
        run.join_all()
        await run.until(RunState.FINISHED)
    pushes = [(push.policy_version, push.reason, push.state) for push in run.coordinator.backend.pushes(10)]
    assert pushes == [(1, "step", "committed"), (1, "catch_up", "aborted"), (2, "step", "committed")]
    assert [audit.is_equal for audit in run.coordinator.backend.audits(10)] == [False, True]
    (last,) = run.coordinator.backend.pushes(1)
    assert {server.server_id: server.dense for server in last.server_reports} == {"rollout-0": False, "rollout-1": True}


async def test_audit_without_probe_prompts_compares_weights_alone(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, push={"audit_prompts": 0}) as run:
        await paused_run(run)
        server = await verify_one(run)
    assert (server.result, server.probe, server.probe_error) == ("equal", None, None)
    assert "actor score" not in run.log


@pytest.mark.parametrize("fault", [UnavailableError("connection refused"), StateError("nothing readable"), None])
async def test_a_server_that_gives_no_digests_is_unknown_but_not_fenced(tmp_path: Path, fault: ShoalError | None) -> None:
    async with RunHarness(tmp_path, push={"verify_timeout_s": 0.1}) as run:
        await paused_run(run)
        run.connector.sink("rollout-0:1").faults["digest"] = [asyncio.Event() if fault is None else fault]
        server = await verify_one(run)
        assert server.result == "unknown"
        assert ("no answer within 0.1 s" if fault is None else str(fault)) in str(server.error)
        assert "rollout-0" in run.coordinator.fleet.traffic_ids()


async def test_a_trainer_that_gives_no_digests_leaves_every_server_unknown(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        run.connector.source_end.faults["digest"] = InternalError("rank 1 died")
        server = await verify_one(run)
    assert server.error == "the trainer gave no digests: InternalError: rank 1 died"
    assert server.probe is not None


async def test_a_probe_that_fails_says_why_and_does_not_hide_the_digests(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        run.connector.actor.fail["score"] = InternalError("out of memory")
        server = await verify_one(run)
    assert (server.result, server.probe, server.probe_error) == ("equal", None, "InternalError: out of memory")


async def test_a_server_that_answers_no_probe_says_why(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        run.connector.rollouts["rollout-0:1"].generate_error = UnavailableError("draining")
        server = await verify_one(run)
    assert (server.result, server.probe_error) == ("equal", "UnavailableError: draining")


async def test_a_server_that_joined_with_the_current_version_has_no_plan_to_compare_by(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await paused_run(run)
        run.join("rollout-1", policy_version=1)
        run.connector.sink("rollout-1:1").served_version = 1
        servers = {server.server_id: server for server in (await run.coordinator.backend.verify_weights(5.0)).servers}
    assert {name: server.result for name, server in servers.items()} == {"rollout-0": "equal", "rollout-1": "unknown"}
    assert servers["rollout-1"].error == "no push of this coordinator has reached it yet"
