"""The reason for a service's end, found in its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.local.last_words import last_words

_STRUCTURED = json.dumps({"level": "error", "event": "rank_failed", "error": "actor.device is cuda; there is none"})
_ENGINE_ERROR = "the engine did not start: Engine core initialization failed."
_ENGINE = json.dumps({"level": "error", "event": "cannot_serve", "error": _ENGINE_ERROR})
_TRACED = json.dumps({"level": "error", "event": "crashed", "exception": "Traceback:\n  File x\nKeyError: 'a'"})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([_STRUCTURED, "torch.distributed.elastic.ChildFailedError: ", "====="], "actor.device is cuda; there is none"),
        (["(EngineCore pid=7) ValueError: too small", _ENGINE], f"ValueError: too small ({_ENGINE_ERROR})"),
        ([_TRACED], "KeyError: 'a'"),
        (["  File x", "ModuleNotFoundError: No module named 'y'", "bye"], "ModuleNotFoundError: No module named 'y'"),
        (
            ["(EngineCore pid=7) ValueError: too small", "RuntimeError: Engine core initialization failed."],
            "ValueError: too small",
        ),
        (["\x1b[31mcoloured\x1b[0m", ""], "coloured"),
        ([json.dumps({"level": "info", "event": "started"})], json.dumps({"level": "info", "event": "started"})),
        ([], ""),
    ],
)
def test_last_words_finds_the_cause(tmp_path: Path, lines: list[str], expected: str) -> None:
    (tmp_path / "log").write_text("\n".join(lines))
    assert last_words(tmp_path / "log") == expected


def test_last_words_of_a_missing_log_are_empty(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none") == ""


def test_last_words_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 1_000_000)
    assert len(last_words(tmp_path / "log")) == 600
