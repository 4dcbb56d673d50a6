"""What the terminal shows of a run."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console

from shoal.cli.progress import alert_text, cells, duration_text, open_view, waiting_text

STEP = {"step": 3, "policy_version": 3, "reward": 0.5, "kl": 0.0123, "response_length": 4.25, "rollout_s": 0.5, "forward_s": 0.25}


def test_cells_show_dashes_for_missing_metrics() -> None:
    assert cells({**STEP, "update_s": 0.25}) == ["3", "3", "0.500", "0.0123", "4.2", "0.50", "0.50", "-", "-", "-"]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"state": "rolling_out"}, "rolling out"),
        (
            {"state": "pushing", "waiting_for": [{"waiter": "coordinator", "waits_for": ["rollout-0"], "what": "push", "waited_s": 3.2}]},
            "pushing; coordinator waits for rollout-0: push (3 s)",
        ),
        (
            {
                "state": "waiting_for_services",
                "waiting_for": [{"waiter": "coordinator", "waits_for": [], "what": "actor", "waited_s": 0.4}],
            },
            "waiting for services; coordinator waits for actor (0 s)",
        ),
    ],
)
def test_waiting_text_names_what_is_waited_for(status: dict[str, object], text: str) -> None:
    assert waiting_text(status) == text


def test_view_prints_plain_lines_when_not_a_terminal() -> None:
    out = StringIO()
    with open_view(Console(file=out, width=200)) as view:
        view.update({"state": "rolling_out", "step": 3, "total_steps": 9}, [STEP])
    assert out.getvalue().startswith("step=3 version=3 reward=0.500 kl=0.0123 length=4.2 rollout_s=0.50")


def test_view_draws_a_table_on_a_terminal() -> None:
    out = StringIO()
    with open_view(Console(file=out, width=120, force_terminal=True)) as view:
        view.update({"state": "rolling_out", "step": 3, "total_steps": 9}, [STEP])
    assert "3/9" in out.getvalue()
    assert "rolling out" in out.getvalue()


ALERT = {
    "what": "60% of the samples of step 4 have no score",
    "service": "reward-1",
    "error": "judge@1: the endpoint\nanswered [red]500",
    "since_unix_s": 1000.0,
}


def test_alert_text_says_what_who_why_since_when_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1300.0)
    text = alert_text({"state": "paused", "alert": ALERT})
    head = "ALERT for 5 min: 60% of the samples of step 4 have no score, reward-1: judge@1: the endpoint\\nanswered [red]500"
    assert text.startswith(head)
    assert text.endswith("then: shoal resume")
    assert alert_text({"alert": None}) == alert_text({}) == ""


@pytest.mark.parametrize(("duration_s", "text"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7300, "2.0 h")])
def test_duration_text(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


def test_plain_view_prints_an_alert_once_and_again_when_it_changes() -> None:
    out = StringIO()
    with open_view(Console(file=out, width=200)) as view:
        for alert in (None, ALERT, ALERT, None, ALERT):
            view.update({"state": "paused", "alert": alert}, [])
    assert out.getvalue().count("ALERT for") == 2


def test_live_view_shows_an_alert() -> None:
    out = StringIO()
    with open_view(Console(file=out, width=300, force_terminal=True)) as view:
        view.update({"state": "paused", "step": 3, "total_steps": 9, "alert": ALERT}, [])
    assert "ALERT for" in out.getvalue()
