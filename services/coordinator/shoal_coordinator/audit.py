"""Do the rollout servers compute with the trainer's weights?

Two comparisons, both of what is really in use:
- every piece of the last plan: digests of the trainer's parameters in the serving dtype against digests of the engine's live weights;
- a probe set: each server answers some prompts greedily, and the trainer scores the same tokens.

The first is exact and decides; the second tells how far apart two correct implementations are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from shoal.config.models import MAX_SCORED_SEQUENCES, RunConfig
from shoal.errors import InternalError, ShoalError, StateError
from shoal.telemetry.logs import get_logger
from shoal.types import Completion, Int32Array, PieceDigests, SamplingParams, TokenScores, TokenSequence
from shoal.weights.plan import ServerPlan
from shoal_coordinator.audit_report import AuditReport, ProbeAgreement, ServerAudit
from shoal_coordinator.error_groups import first_error
from shoal_coordinator.gangs import Gang
from shoal_coordinator.members import RolloutMember
from shoal_coordinator.push_calls import outcome_of, outcomes_of, reason_of

log = get_logger(__name__)

PROBE_NEW_TOKENS = 16
PROBE_TIMEOUT_S = 60.0
"""Deadline of the generation of all probes, and of their scoring."""


class Auditor:
    """Audits servers; the caller sees to it that no push runs meanwhile and that the trainer's weights do not change."""

    def __init__(self, config: RunConfig) -> None:
        self._digest_timeout_s = config.push.verify_timeout_s
        self._num_prompts = config.push.audit_prompts
        self._max_new_tokens = min(PROBE_NEW_TOKENS, config.rollout.max_new_tokens)
        self._run_id = config.run.id
        self._num_audits = 0
        self.probe_prompts: Sequence[Int32Array] = ()
        """Prompts to choose the probe set from; [P] ids each."""

    async def audit(self, actor: Gang, members: Mapping[str, RolloutMember], policy_version: int) -> AuditReport:
        """Compare servers with the actor; never fails: what could not be compared says why.

        Args:
            members: servers that serve policy_version.
        """
        started_unix_s, started_s = time.time(), time.monotonic()
        self._num_audits += 1
        audits = await self._compare_weights(actor, members, policy_version)
        probes = await self._probe(actor, members, policy_version)
        servers = {name: _with_probe(audits[name], probes.get(name)) for name in sorted(members)}
        for server in servers.values():
            _log_server(server, policy_version)
        return AuditReport(
            policy_version=policy_version, servers=servers, started_unix_s=started_unix_s, duration_s=time.monotonic() - started_s
        )

    async def _compare_weights(self, actor: Gang, members: Mapping[str, RolloutMember], policy_version: int) -> dict[str, ServerAudit]:
        plans = {name: member.plan for name, member in members.items() if member.plan is not None}
        unplanned = {
            name: ServerAudit(server_id=name, error="no push of this coordinator has reached it yet")
            for name in members
            if name not in plans
        }
        if not plans:
            return unplanned
        timeout_s = self._digest_timeout_s
        hashes = {name: plan.plan_hash for name, plan in plans.items()}
        async with asyncio.TaskGroup() as group:
            digesting = group.create_task(outcome_of(actor.require_source().digest(policy_version, hashes, timeout_s=timeout_s), timeout_s))
            engines = await outcomes_of(
                {name: members[name].sink.digest(policy_version, hashes[name], timeout_s=timeout_s) for name in plans}, timeout_s
            )
        trainer = digesting.result()
        return unplanned | {name: await _compare(name, plan, trainer, engines[name]) for name, plan in plans.items()}

    async def _probe(self, actor: Gang, members: Mapping[str, RolloutMember], policy_version: int) -> dict[str, ProbeAgreement | Exception]:
        prompts = [tuple(map(int, ids)) for ids in self.probe_prompts[: self._num_prompts]]
        if not prompts:
            return {}
        generating = {name: self._generate(member, prompts, policy_version) for name, member in members.items()}
        answers: dict[str, list[Completion]] = {}
        probes: dict[str, ProbeAgreement | Exception] = {}
        for name, outcome in (await outcomes_of(generating, PROBE_TIMEOUT_S)).items():
            if isinstance(outcome, Exception):
                probes[name] = outcome
            else:
                answers[name] = outcome
        return probes | await _score(actor, prompts, answers, policy_version)

    async def _generate(self, member: RolloutMember, prompts: Sequence[tuple[int, ...]], policy_version: int) -> list[Completion]:
        """One greedy completion for each prompt, in order."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(member, index, ids, policy_version)) for index, ids in enumerate(prompts)]
        except* ShoalError as errors:
            raise first_error(errors) from None
        return [task.result() for task in tasks]

    async def _complete(self, member: RolloutMember, index: int, prompt_ids: tuple[int, ...], policy_version: int) -> Completion:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self._max_new_tokens, ignore_eos=True)
        request_id = f"{self._run_id}/audit-{self._num_audits}/{index}"
        call = member.client.generate(request_id, prompt_ids, sampling, 1, (), policy_version, timeout_s=PROBE_TIMEOUT_S)
        async with aclosing(call) as stream:
            async for completion in stream:
                return completion
        raise InternalError(f"rollout server {member.info.service_id!r} did not answer probe {index}")


async def _score(
    actor: Gang, prompts: Sequence[tuple[int, ...]], answers: Mapping[str, Sequence[Completion]], policy_version: int
) -> dict[str, ProbeAgreement | Exception]:
    """Let the trainer score what the servers answered."""
    sequences = [
        TokenSequence(prompt_ids=prompt_ids, response_ids=tuple(completion.response_ids.tolist()))
        for completions in answers.values()
        for prompt_ids, completion in zip(prompts, completions, strict=True)
    ]
    if not sequences:
        return {}
    outcome = await outcome_of(_score_all(actor, sequences, policy_version), PROBE_TIMEOUT_S)
    if isinstance(outcome, Exception):
        return dict.fromkeys(answers, outcome)
    remaining = iter(outcome)
    return {name: agreement(completions, [next(remaining) for _ in completions]) for name, completions in answers.items()}


async def _score_all(actor: Gang, sequences: Sequence[TokenSequence], policy_version: int) -> list[TokenScores]:
    """As many sequences in a call as the trainer takes.

    Raises: StateError: the trainer holds another version.
    """
    scores: list[TokenScores] = []
    for start in range(0, len(sequences), MAX_SCORED_SEQUENCES):
        part = sequences[start : start + MAX_SCORED_SEQUENCES]
        found, scored_version = await actor.trainer.score_tokens(part, timeout_s=PROBE_TIMEOUT_S)
        if scored_version != policy_version:
            raise StateError(f"the trainer scored with policy version {scored_version}, the servers with {policy_version}")
        scores += found
    return scores


def agreement(completions: Sequence[Completion], scores: Sequence[TokenScores]) -> ProbeAgreement:
    """How far a server's greedy answers and the trainer's scores of them are apart.

    Args:
        completions: response_ids and rollout_logprobs [T] each.
        scores: of the same tokens, [T] each, in the same order.
    """
    num_tokens = num_equal = 0
    difference = 0.0
    for completion, score in zip(completions, scores, strict=True):
        num_tokens += completion.response_ids.size
        num_equal += int((completion.response_ids == np.array(score.greedy_ids, np.int32)).sum())
        if completion.response_ids.size:
            apart = np.abs(completion.rollout_logprobs.astype(np.float64) - np.array(score.logprobs, np.float64))
            largest = float(apart.max())
            # max() would pass over NaN.
            difference = max(difference, largest if math.isfinite(largest) else math.inf)
    return ProbeAgreement(num_tokens=num_tokens, max_logprob_difference=difference, num_equal_greedy=num_equal)


async def _compare(
    server_id: str,
    plan: ServerPlan,
    trainer: Mapping[str, tuple[PieceDigests, ...]] | Exception,
    engine: tuple[PieceDigests, ...] | Exception,
) -> ServerAudit:
    if isinstance(trainer, Exception):
        return ServerAudit(server_id=server_id, error=f"the trainer gave no digests: {reason_of(trainer)}")
    if isinstance(engine, Exception):
        return ServerAudit(server_id=server_id, error=f"the server gave no digests: {reason_of(engine)}")
    if server_id not in trainer:
        return ServerAudit(server_id=server_id, error="the trainer gave no digests for it")
    # A plan of a large model has some hundred thousand pieces.
    return await asyncio.to_thread(compare_digests, server_id, plan, trainer[server_id], engine)


def compare_digests(server_id: str, plan: ServerPlan, trainer: Sequence[PieceDigests], engine: Sequence[PieceDigests]) -> ServerAudit:
    """Compare two ends piece by piece, in the plan's order.

    Returns: counts, and the first piece that differs; an error if an end did not digest every piece of the plan.
    """
    theirs = {(pair.rank, pair.worker_rank): pair.xxh3 for pair in engine}
    ours = {(pair.rank, pair.worker_rank): pair.xxh3 for pair in trainer}
    parameters: set[tuple[int, str]] = set()
    num_pieces = num_differing = 0
    first: str | None = None
    for rank, worker_rank in plan.pairs():
        pieces = [piece for bucket in plan.buckets(rank, worker_rank) for piece in bucket.pieces]
        for end, digests in (("trainer", ours), ("server", theirs)):
            if len(digests.get((rank, worker_rank), ())) != len(pieces):
                found = len(digests.get((rank, worker_rank), ()))
                error = f"the {end} digested {found} of the {len(pieces)} pieces from rank {rank} to worker {worker_rank}"
                return ServerAudit(server_id=server_id, error=error)
        for piece, our, their in zip(pieces, ours[rank, worker_rank], theirs[rank, worker_rank], strict=True):
            num_pieces += 1
            parameters.add((worker_rank, piece.parameter))
            if our != their:
                num_differing += 1
                first = first or f"{piece.parameter} of worker {worker_rank} (from {piece.source_name} of rank {rank})"
    return ServerAudit(
        server_id=server_id,
        num_parameters=len(parameters),
        num_pieces=num_pieces,
        num_differing=num_differing,
        first_difference=first,
    )


def _with_probe(audit: ServerAudit, probe: ProbeAgreement | Exception | None) -> ServerAudit:
    if isinstance(probe, Exception):
        return replace(audit, probe_error=reason_of(probe))
    return replace(audit, probe=probe)


def _log_server(server: ServerAudit, policy_version: int) -> None:
    if server.differs:
        log.error(
            "audit_differs",
            server_id=server.server_id,
            policy_version=policy_version,
            first_difference=server.first_difference,
            num_differing=server.num_differing,
            num_pieces=server.num_pieces,
        )
    else:
        log.info("audited", server_id=server.server_id, policy_version=policy_version, result=server.result, error=server.error)


def require_comparable(members: Mapping[str, RolloutMember], policy_version: int) -> None:
    """Refuse an audit that could compare nothing.

    Raises: StateError: no server is ready, or no push has been committed yet.
    """
    if not members:
        raise StateError(f"no rollout server serves policy version {policy_version} now; wait until one is ready")
    if all(member.plan is None for member in members.values()):
        raise StateError("no weight push has been committed yet, so there is no plan to compare by; wait for the first step's push")
