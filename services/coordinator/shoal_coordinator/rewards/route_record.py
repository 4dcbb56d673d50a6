"""What the audit log's lines amount to: every revision, its stage, and what is active. The same code applies new lines and old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import BaseModel, ConfigDict, TypeAdapter

from shoal.errors import InternalError, NotFoundError, StateError
from shoal_coordinator.rewards.audit_log import LogEntry, RouteAction
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.route_stages import RouteStage, check_transition


class UnknownRevisionError(NotFoundError):
    """There is no revision of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRecord:
    """A revision and where it is.

    addresses: servers that cannot register, which the coordinator asks itself. problem: why it was rejected.
    gates: it is activated once its comparison passes them; armed_by: who asked for that, and why.
    """

    revision: RouteRevision
    stage: RouteStage
    created_unix_s: float
    stage_since_unix_s: float
    addresses: tuple[str, ...] = ()
    problem: str | None = None
    shadow_share: float | None = None
    gates: Gates | None = None
    armed_by: tuple[str, str] | None = None


class _StoredComponent(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    scorer: str
    version: str
    fingerprint: str
    weight: float
    parts: dict[str, float]
    timeout_s: float
    is_required: bool
    sources: tuple[str, ...]


_COMPONENTS = TypeAdapter(tuple[_StoredComponent, ...])
_TEXT = TypeAdapter(str)
_TEXTS = TypeAdapter(tuple[str, ...])
_NUMBER = TypeAdapter(float)


def stored_components(components: Sequence[RouteComponent]) -> list[dict[str, object]]:
    """Components as a line keeps them."""
    return [asdict(component) | {"parts": dict(component.parts), "sources": list(component.sources)} for component in components]


def stored_gates(gates: Gates) -> dict[str, object]:
    """Gates as a line keeps them."""
    return asdict(gates)


class RouteLedger:
    """Revisions by number, in memory; `plan` says what a line would change, `commit` changes it."""

    def __init__(self) -> None:
        self._records: dict[int, RouteRecord] = {}
        self._came_after: dict[int, int] = {}
        self.active = 0

    def record(self, number: int) -> RouteRecord:
        """A revision.

        Raises: UnknownRevisionError: there is none of that number; says which there are.
        """
        try:
            return self._records[number]
        except KeyError:
            there_is = ", ".join(map(str, self._records)) or "none"
            raise UnknownRevisionError(f"the reward route has no revision {number}; there is: {there_is}") from None

    def records(self) -> tuple[RouteRecord, ...]:
        """All revisions, oldest first."""
        return tuple(self._records.values())

    @property
    def next_number(self) -> int:
        """Number of the next revision."""
        return len(self._records) + 1

    @property
    def previous(self) -> int:
        """The revision that was active before the active one was made so; 0 if there is none."""
        return self._came_after.get(self.active, 0)

    def plan(self, entry: LogEntry) -> Mapping[int, RouteRecord]:
        """What a line changes.

        Raises: StateError: the table forbids it. NotFoundError: no such revision. ValueError: its detail cannot be read.
        """
        if entry.action is RouteAction.OPEN:
            return {}
        changed = self._changed(entry)
        if entry.active != self._active_after(entry):
            raise StateError(f"active is {entry.active}, which should be {self._active_after(entry)}")
        return changed

    def commit(self, entry: LogEntry, changed: Mapping[int, RouteRecord]) -> None:
        """Change what `plan` said."""
        if self._active_after(entry) != self.active:
            self._came_after[entry.revision] = self.active
        self.active = entry.active
        self._records.update(changed)

    def _active_after(self, entry: LogEntry) -> int:
        return entry.revision if entry.action in (RouteAction.ACTIVATE, RouteAction.ROLLBACK) else self.active

    def _changed(self, entry: LogEntry) -> Mapping[int, RouteRecord]:
        if entry.action is RouteAction.ADD:
            return {entry.revision: self._added(entry)}
        old = self.record(entry.revision)
        stage = RouteStage(entry.stage)
        expected = _STAGE_AFTER.get(entry.action, old.stage)
        if stage is not expected:
            raise StateError(f"stage is {stage}, which should be {expected}")
        needed = _STAGE_BEFORE.get(entry.action, old.stage)
        if old.stage is not needed:
            raise StateError(f"revision {entry.revision} of the reward route is {old.stage}; {entry.action} needs one that is {needed}")
        if entry.action is RouteAction.ARM or (entry.action is RouteAction.SHADOW and old.stage is RouteStage.SHADOW):
            return {entry.revision: _detailed(old, entry)}
        check_transition(entry.revision, old.stage, stage)
        moved = replace(old, stage=stage, stage_since_unix_s=entry.unix_s)
        if stage is not RouteStage.SHADOW:
            moved = replace(moved, shadow_share=None, gates=None, armed_by=None)
        return {entry.revision: _detailed(moved, entry), **self._replaced(entry)}

    def _added(self, entry: LogEntry) -> RouteRecord:
        if entry.revision != self.next_number or entry.stage != RouteStage.REGISTERED:
            raise StateError(f"revision {entry.revision} in stage {entry.stage!r}; the next is {self.next_number}, registered")
        revision = RouteRevision(
            number=entry.revision, label=_TEXT.validate_python(entry.detail.get("label")), components=_components(entry)
        )
        return RouteRecord(
            revision=revision,
            stage=RouteStage.REGISTERED,
            created_unix_s=entry.unix_s,
            stage_since_unix_s=entry.unix_s,
            addresses=_TEXTS.validate_python(entry.detail.get("addresses", [])),
        )

    def _replaced(self, entry: LogEntry) -> Mapping[int, RouteRecord]:
        """The revision that is no longer active: it changes in the same line, so that one is active at all times."""
        if entry.action not in (RouteAction.ACTIVATE, RouteAction.ROLLBACK) or not self.active:
            return {}
        old = self.record(self.active)
        check_transition(self.active, old.stage, RouteStage.DRAINING)
        return {self.active: replace(old, stage=RouteStage.DRAINING, stage_since_unix_s=entry.unix_s)}


_STAGE_AFTER: Mapping[RouteAction, RouteStage] = {
    RouteAction.CHECK: RouteStage.CHECKED,
    RouteAction.READY: RouteStage.READY,
    RouteAction.REJECT: RouteStage.REJECTED,
    RouteAction.SHADOW: RouteStage.SHADOW,
    RouteAction.STOP_SHADOW: RouteStage.READY,
    RouteAction.ARM: RouteStage.SHADOW,
    RouteAction.ACTIVATE: RouteStage.ACTIVE,
    RouteAction.ROLLBACK: RouteStage.ACTIVE,
    RouteAction.DRAIN: RouteStage.DRAINED,
    RouteAction.RETIRE: RouteStage.RETIRED,
}

_STAGE_BEFORE: Mapping[RouteAction, RouteStage] = {
    RouteAction.CHECK: RouteStage.REGISTERED,
    RouteAction.READY: RouteStage.CHECKED,
    RouteAction.STOP_SHADOW: RouteStage.SHADOW,
    RouteAction.ARM: RouteStage.SHADOW,
    RouteAction.DRAIN: RouteStage.DRAINING,
}
"""Where the table of stages allows more than the action means."""


def stage_after(action: RouteAction) -> RouteStage:
    """The stage of a revision after an action on it.

    Raises: InternalError: it is no action on a revision.
    """
    if action is RouteAction.ADD:
        return RouteStage.REGISTERED
    try:
        return _STAGE_AFTER[action]
    except KeyError:
        raise InternalError(f"action {action} leads to no stage") from None


def _detailed(record: RouteRecord, entry: LogEntry) -> RouteRecord:
    """The record with what the line's detail says."""
    if entry.action is RouteAction.CHECK:
        return replace(record, revision=replace(record.revision, components=_components(entry)))
    if entry.action is RouteAction.REJECT:
        return replace(record, problem=_TEXT.validate_python(entry.detail.get("problem")))
    if entry.action is RouteAction.SHADOW:
        return replace(record, shadow_share=_NUMBER.validate_python(entry.detail.get("share")))
    if entry.action is RouteAction.ARM:
        gates = TypeAdapter(Gates).validate_python(entry.detail.get("gates"))
        return replace(record, gates=gates, armed_by=(entry.who, entry.why))
    return record


def _components(entry: LogEntry) -> tuple[RouteComponent, ...]:
    stored = _COMPONENTS.validate_python(entry.detail.get("components"))
    return tuple(RouteComponent(**component.model_dump()) for component in stored)
