"""The REST API of reward routes: what there is, and the commands that change it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Protocol

from fastapi import FastAPI, Path, Query

from shoal_coordinator.rest_models import ErrorModel
from shoal_coordinator.rest_reward_models import (
    ActivateBody,
    AddBody,
    ComparisonModel,
    LogModel,
    ReasonBody,
    RewardsModel,
    RouteModel,
    ShadowBody,
    SlowSamplesModel,
)

MAX_LOG_PER_PAGE = 10_000
_TAGS: list[str | Enum] = ["rewards"]
_UNKNOWN: dict[int | str, dict[str, object]] = {404: {"model": ErrorModel, "description": "no such revision"}}
_REFUSED: dict[int | str, dict[str, object]] = {409: {"model": ErrorModel, "description": "not possible from this stage"}}
_BAD: dict[int | str, dict[str, object]] = {422: {"model": ErrorModel, "description": "the body cannot be used"}}
_COMMAND = _REFUSED | _UNKNOWN | _BAD

Number = Annotated[int, Path(ge=1, description="Number of the revision.")]


class RewardReads(Protocol):
    """What the API shows of rewards."""

    def rewards(self) -> RewardsModel:
        """Revisions and servers."""
        ...

    def comparison(self, number: int) -> ComparisonModel:
        """How a revision compares with the active one. Raises: NotFoundError: no such revision."""
        ...

    def reward_log(self, limit: int) -> LogModel:
        """The last lines of the audit log."""
        ...

    def slow_samples(self) -> SlowSamplesModel:
        """Samples that took long to score."""
        ...


class RewardCommands(Protocol):
    """What the API changes. All raise StateError where the stage forbids it, and NotFoundError for an unknown revision."""

    async def add_route(self, body: AddBody) -> RouteModel:
        """Register a revision. Raises: InvalidRequestError: it cannot be used."""
        ...

    async def shadow_route(self, number: int, body: ShadowBody) -> RouteModel:
        """Shadow a share of the groups, or stop it."""
        ...

    async def activate_route(self, number: int, body: ActivateBody) -> RouteModel:
        """Activate a revision, now or once gates pass."""
        ...

    async def rollback_route(self, body: ReasonBody) -> RouteModel:
        """Go back to what was active before."""
        ...

    async def retire_route(self, number: int, body: ReasonBody) -> RouteModel:
        """Use a revision no more."""
        ...


class RewardBackend(RewardReads, RewardCommands, Protocol):
    """Everything that the API of rewards is over."""


def add_reward_routes(app: FastAPI, backend: RewardBackend) -> None:
    """Add the paths under /v1/rewards."""
    _add_reads(app, backend)
    _add_changes(app, backend)
    _add_switches(app, backend)


def _add_reads(app: FastAPI, backend: RewardReads) -> None:
    @app.get("/v1/rewards", summary="Reward routes and servers", tags=_TAGS)
    async def read_rewards() -> RewardsModel:
        return backend.rewards()

    summary = "How a revision in shadow compares with the active one"

    @app.get("/v1/rewards/routes/{number}/comparison", summary=summary, tags=_TAGS, responses=_UNKNOWN)
    async def read_comparison(number: Number) -> ComparisonModel:
        return backend.comparison(number)

    @app.get("/v1/rewards/log", summary="Who changed the reward route, when and why", tags=_TAGS)
    async def read_log(
        limit: Annotated[int, Query(ge=1, le=MAX_LOG_PER_PAGE, description="At most so many.")] = 100,
    ) -> LogModel:
        return backend.reward_log(limit)

    @app.get("/v1/rewards/slow", summary="Samples that took long to score", tags=_TAGS)
    async def read_slow() -> SlowSamplesModel:
        return backend.slow_samples()


def _add_changes(app: FastAPI, backend: RewardCommands) -> None:
    @app.post("/v1/rewards/routes", summary="Register a revision; its checks begin at once", tags=_TAGS, responses=_REFUSED | _BAD)
    async def add_route(body: AddBody) -> RouteModel:
        return await backend.add_route(body)

    summary = "Let a revision score a share of the live groups beside the active one"

    @app.post("/v1/rewards/routes/{number}/shadow", summary=summary, tags=_TAGS, responses=_COMMAND)
    async def shadow_route(number: Number, body: ShadowBody) -> RouteModel:
        return await backend.shadow_route(number, body)

    @app.post("/v1/rewards/routes/{number}/retire", summary="Use a revision no more", tags=_TAGS, responses=_COMMAND)
    async def retire_route(number: Number, body: ReasonBody) -> RouteModel:
        return await backend.retire_route(number, body)


def _add_switches(app: FastAPI, backend: RewardCommands) -> None:
    summary = "Score new groups by a revision, now or once its comparison passes gates"

    @app.post("/v1/rewards/routes/{number}/activate", summary=summary, tags=_TAGS, responses=_COMMAND)
    async def activate_route(number: Number, body: ActivateBody) -> RouteModel:
        return await backend.activate_route(number, body)

    @app.post("/v1/rewards/rollback", summary="Go back to what was active before", tags=_TAGS, responses=_REFUSED | _BAD)
    async def rollback_route(body: ReasonBody) -> RouteModel:
        return await backend.rollback_route(body)
