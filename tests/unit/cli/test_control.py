"""`shoal pause`, `resume`, `stop` and what `shoal status` says of the reward."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.errors import StateError
from tests.helpers.fake_rest import error, fake_rest

STATUS: dict[str, Any] = {"run_id": "run", "state": "training", "step": 3, "total_steps": 9, "policy_version": 3, "waiting_for": []}
ALERT = {"what": "60% of the samples have no score", "service": "reward-1", "error": "judge@1: down", "since_unix_s": 0.0}


@pytest.mark.parametrize(
    ("command", "changes", "line"),
    [
        ("pause", {"pause_requested": True}, "run run: training; it pauses before the next step"),
        ("pause", {"pause_requested": True, "state": "paused"}, "run run: paused"),
        ("stop", {"stop_requested": True}, "run run: training; it ends after the current step"),
        ("resume", {}, "run run: training"),
    ],
)
def test_a_command_is_sent_and_says_what_comes(command: str, changes: dict[str, Any], line: str) -> None:
    with fake_rest({f"POST /v1/{command}": STATUS | changes}) as rest:
        result = CliRunner().invoke(app, [command, "--address", rest.address])
    assert result.stdout.splitlines() == [line]


def test_a_command_that_cannot_be_says_why() -> None:
    refused = error(409, "cannot resume a run that is not paused (it is training)")
    with fake_rest({"POST /v1/resume": refused}) as rest:
        result = CliRunner().invoke(app, ["resume", "--address", rest.address])
    assert isinstance(result.exception, StateError)
    assert str(result.exception) == "cannot resume a run that is not paused (it is training)"


def test_status_shows_the_alert_and_the_revision() -> None:
    answers = {
        "GET /v1/status": STATUS | {"state": "paused", "alert": ALERT, "route_revision": 2},
        "GET /v1/services": {"services": []},
        "GET /v1/steps?after=2&limit=1000": {"steps": []},
    }
    with fake_rest(answers) as rest:
        result = CliRunner().invoke(app, ["status", "--address", rest.address], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[2] == "reward: revision 2 of the route (shoal reward list)"
    assert "60% of the samples have no score, reward-1: judge@1: down" in lines[3]
    assert "shoal resume" in lines[3]
