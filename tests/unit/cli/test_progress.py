"""What the terminal shows of a run."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shoal.cli.progress import cells, open_view, waiting_text

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
