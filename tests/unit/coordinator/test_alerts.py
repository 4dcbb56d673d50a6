"""What a human is told when the run waits for one."""

from __future__ import annotations

import pytest
from shoal_coordinator.alerts import AlertBoard, RunAlert

from shoal.telemetry.metrics import sample_value


def test_alert_is_shown_until_it_is_cleared_and_its_error_stays_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """An error may quote the response that it is about."""
    board = AlertBoard()
    alert = RunAlert(what="3 of 4 samples have no score", service="math@1 on reward-0", error="ValueError: could not convert 'my secret'")
    board.show(alert)
    assert (board.current, sample_value("shoal_coordinator_alert")) == (alert, 1.0)
    (record,) = [record for record in caplog.records if record.getMessage() == "run_alert"]
    assert record.__dict__["shoal_fields"] == {"what": "3 of 4 samples have no score", "service": "math@1 on reward-0"}
    board.clear()
    assert (board.current, sample_value("shoal_coordinator_alert")) == (None, 0.0)
