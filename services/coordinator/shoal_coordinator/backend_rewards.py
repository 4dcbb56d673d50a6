"""Shows reward routes to the REST API, and passes on what users ask of them."""

from __future__ import annotations

from dataclasses import asdict

from shoal.types import ScorerDescription
from shoal_coordinator.members import RewardMember
from shoal_coordinator.rest_reward_models import (
    ActivateBody,
    AddBody,
    ComparisonModel,
    ComponentBody,
    ComponentModel,
    GatesModel,
    LogEntryModel,
    LogModel,
    ReasonBody,
    RewardScorerModel,
    RewardServerModel,
    RewardsModel,
    RouteModel,
    RowCheckModel,
    ShadowBody,
    SlowSampleModel,
    SlowSamplesModel,
)
from shoal_coordinator.rewards.assembly import RewardPath
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_record import RouteRecord
from shoal_coordinator.rewards.static_servers import is_static

OTHER_CODE = "other code under the same version"


class RouteBackend:
    """The `RewardBackend` of a real run."""

    def __init__(self, path: RewardPath) -> None:
        self._lifecycle = path.lifecycle
        self._parts = path.parts
        self._book = path.book
        self._slow = path.slow
        self._rows = path.rows

    def rewards(self) -> RewardsModel:
        """Revisions and servers."""
        return RewardsModel(
            active=self._book.active_number,
            revisions=[self._route(record) for record in self._book.records()],
            servers=self._servers(),
            rows=self._checked_rows(),
        )

    def comparison(self, number: int) -> ComparisonModel:
        """How a revision compares with the active one. Raises: NotFoundError: no such revision."""
        return ComparisonModel.model_validate(asdict(self._lifecycle.comparison(number)))

    def reward_log(self, limit: int) -> LogModel:
        """The last lines of the audit log."""
        return LogModel(entries=[LogEntryModel.model_validate(entry.model_dump(mode="json")) for entry in self._book.entries(limit)])

    def slow_samples(self) -> SlowSamplesModel:
        """Samples that took long to score."""
        return SlowSamplesModel(samples=[SlowSampleModel.model_validate(asdict(sample)) for sample in self._slow.samples()])

    async def add_route(self, body: AddBody) -> RouteModel:
        """Register a revision."""
        components = [self._component(component) for component in body.components]
        revision = await self._lifecycle.add(body.label, components, body.addresses, who=body.who, why=body.why)
        return self._route_of(revision.number)

    async def shadow_route(self, number: int, body: ShadowBody) -> RouteModel:
        """Shadow a share of the groups, or stop it."""
        await self._lifecycle.shadow(number, body.share, who=body.who, why=body.why)
        return self._route_of(number)

    async def activate_route(self, number: int, body: ActivateBody) -> RouteModel:
        """Activate a revision, now or once gates pass."""
        gates = None if body.gates is None else Gates(**body.gates.model_dump())
        await self._lifecycle.activate(number, gates, when_gates_pass=body.when_gates_pass, who=body.who, why=body.why)
        return self._route_of(number)

    async def rollback_route(self, body: ReasonBody) -> RouteModel:
        """Go back to what was active before."""
        revision = await self._lifecycle.rollback(who=body.who, why=body.why)
        return self._route_of(revision.number)

    async def retire_route(self, number: int, body: ReasonBody) -> RouteModel:
        """Use a revision no more."""
        await self._lifecycle.retire(number, who=body.who, why=body.why)
        return self._route_of(number)

    def _checked_rows(self) -> RowCheckModel | None:
        tally = self._rows.tally
        if tally is None:
            return None
        return RowCheckModel(num_checked=tally.num_checked, num_unscored=len(tally.unscored), num_not_correct=len(tally.not_correct))

    def _component(self, body: ComponentBody) -> RouteComponent:
        return RouteComponent(
            scorer=body.scorer,
            version=body.version,
            weight=body.weight,
            parts=body.parts,
            timeout_s=self._parts.config.reward.timeout_s if body.timeout_s is None else body.timeout_s,
            is_required=body.is_required,
            sources=tuple(body.sources),
        )

    def _route_of(self, number: int) -> RouteModel:
        return self._route(self._book.record(number))

    def _route(self, record: RouteRecord) -> RouteModel:
        revision = record.revision
        return RouteModel(
            number=revision.number,
            label=revision.label,
            stage=record.stage,
            components=[_component_model(component) for component in revision.components],
            created_unix_s=record.created_unix_s,
            stage_since_unix_s=record.stage_since_unix_s,
            num_open_groups=self._book.num_open_groups(revision.number),
            problem=record.problem,
            shadow_share=record.shadow_share,
            gates=None if record.gates is None else GatesModel.model_validate(asdict(record.gates)),
            gate_problems=self._lifecycle.problems(record),
        )

    def _servers(self) -> list[RewardServerModel]:
        other_code = {offer.member.info.service_id: offer.scorer for offer in self._lifecycle.servers_with_other_code()}
        members = {member.info.service_id: member for member in self._parts.servers.rewards()}
        models = [_server_model(member, other_code.get(service_id)) for service_id, member in members.items()]
        silent = [_silent_model(address, why) for address, why in self._parts.statics.problems().items() if address not in members]
        return sorted([*models, *silent], key=lambda model: model.service_id)


def _component_model(component: RouteComponent) -> ComponentModel:
    return ComponentModel.model_validate(asdict(component) | {"parts": dict(component.parts), "sources": list(component.sources)})


def _server_model(member: RewardMember, other_code: ScorerDescription | None) -> RewardServerModel:
    state, problem = ("silent", member.problem or "it has not said yet what it offers") if member.suspect else ("ready", None)
    if other_code is not None:
        state = OTHER_CODE
        problem = f"{other_code.name}@{other_code.version} is {OTHER_CODE} ({other_code.fingerprint or 'unknown'}): give it another version"
    return RewardServerModel(
        service_id=member.info.service_id,
        address=member.info.address,
        is_static=is_static(member.info),
        state=state,
        problem=problem,
        scorers=[_scorer_model(scorer) for scorer in member.scorers],
    )


def _silent_model(address: str, problem: str) -> RewardServerModel:
    return RewardServerModel(service_id=address, address=address, is_static=True, state="silent", problem=problem, scorers=[])


def _scorer_model(scorer: ScorerDescription) -> RewardScorerModel:
    return RewardScorerModel(name=scorer.name, version=scorer.version, fingerprint=scorer.fingerprint, description=scorer.description)
