"""Structured logs: fields, formats, and what never gets in."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.config.models import TelemetrySection
from shoal.telemetry.logs import MAX_FIELD_CHARS, get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, shoal = logging.getLogger(), logging.getLogger("shoal")
    before = (list(root.handlers), root.level, shoal.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    shoal.setLevel(before[2])


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in stream.getvalue().splitlines()]


def test_log_json_event_has_service_run_and_fields() -> None:
    stream = io.StringIO()
    setup_logging("rollout-0", TelemetrySection(), run_id="demo", stream=stream)
    get_logger("shoal_rollout.server").bind(stage="commit").info("push_committed", pause_ms=3.5, ids=[1, 2], nested={"a": None})
    (line,) = _lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "service": "rollout-0",
        "run": "demo",
        "logger": "shoal.rollout.server",
        "event": "push_committed",
        "stage": "commit",
        "pause_ms": 3.5,
        "ids": [1, 2],
        "nested": {"a": None},
    }


def test_log_prompts_tokens_and_secrets_are_withheld() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(), stream=stream)
    hidden = "tell me a secret"
    get_logger("shoal.x").info("event", prompt=hidden, response_ids=[4242], detail={"text": hidden, "Password": hidden}, num_tokens=7)
    (line,) = _lines(stream)
    assert hidden not in stream.getvalue()
    assert "4242" not in stream.getvalue()
    assert (line["prompt"], line["detail"]["text"], line["num_tokens"]) == ("[withheld]", "[withheld]", 7)


def test_log_arrays_bytes_and_long_values_are_bounded() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(), stream=stream)
    get_logger("shoal.x").info("event", array=np.full((3, 4), 77, np.int32), raw=b"abc", long="x" * 10_000, many=list(range(5000)))
    (line,) = _lines(stream)
    assert (line["array"], line["raw"]) == ("<array int32 (3, 4)>", "<3 bytes>")
    assert len(line["long"]) < MAX_FIELD_CHARS + 50
    assert len(line["many"]) == 100


def test_log_non_finite_numbers_stay_valid_json() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(), stream=stream)
    get_logger("shoal.x").info("event", loss=float("nan"), norm=float("inf"), scalar=np.float32(0.5))
    (line,) = _lines(stream)
    assert (line["loss"], line["norm"]) == ("nan", "inf")


def test_log_field_named_like_a_standard_one_does_not_replace_it() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(), stream=stream)
    get_logger("shoal.x").info("event", level="mine", service="other", name="n", message="m", args="a")
    (line,) = _lines(stream)
    assert (line["level"], line["level_"], line["service"], line["service_"]) == ("info", "mine", "s", "other")
    assert (line["name"], line["message"], line["args"]) == ("n", "m", "a")


def test_log_exception_has_its_traceback() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(), stream=stream)
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("shoal.x").exception("failed", step=3)
    (line,) = _lines(stream)
    assert line["level"] == "error"
    assert "ValueError: boom" in line["exception"]


def test_log_text_format_is_one_plain_line() -> None:
    stream = io.StringIO()
    setup_logging("trainer", TelemetrySection(log_format="text"), stream=stream)
    get_logger("shoal.x").warning("lease_lost", service_id="a b")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('WARNING trainer shoal.x: lease_lost service_id="a b"')


def test_log_level_holds_for_shoal_and_quiets_other_libraries() -> None:
    stream = io.StringIO()
    setup_logging("s", TelemetrySection(log_level="info"), stream=stream)
    get_logger("shoal.x").debug("hidden")
    get_logger("shoal.x").info("shown")
    logging.getLogger("other.library").info("hidden")
    logging.getLogger("other.library").warning("100%% sure %s", "shown too")
    assert [line["event"] for line in _lines(stream)] == ["shown", "100% sure shown too"]


def test_setup_logging_twice_writes_each_event_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("a", TelemetrySection(), stream=first)
    setup_logging("b", TelemetrySection(), stream=second)
    get_logger("shoal.x").info("event")
    assert first.getvalue() == ""
    assert [line["service"] for line in _lines(second)] == ["b"]
