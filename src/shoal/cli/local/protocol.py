"""What the command and the supervisor say to each other: one JSON object a line over the supervisor's stdin and stdout."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RestartPolicy(StrEnum):
    """What the supervisor does when a service ends without having been told to."""

    NEVER = "never"
    ON_FAILURE = "on_failure"


class ServiceSpec(_Message):
    """A process to start. Services stop in ascending stop_order; equal ones together."""

    name: str
    argv: list[str]
    env: dict[str, str] = Field(default_factory=dict)
    log_path: str
    restart: RestartPolicy = RestartPolicy.NEVER
    max_restarts: int = 3
    stop_order: int = 0


class Event(_Message):
    """Something that happened to a service. kind is started, exited, restarting or stopped (the supervisor is done)."""

    kind: str
    service: str = ""
    pid: int = 0
    exit_code: int | None = None
    message: str = ""
