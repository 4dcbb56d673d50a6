"""Configurations for tests of their rules."""

from __future__ import annotations

from typing import Any

from shoal.config.load import build_config
from shoal.config.models import RunConfig

_BASE: dict[str, dict[str, Any]] = {"run": {"id": "demo", "folder": "runs/demo"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def checked_config(**sections: dict[str, Any]) -> RunConfig:
    """A small configuration with some fields set, read and checked as a file is.

    Raises: ConfigError: a rule is broken.
    """
    return build_config({name: _BASE.get(name, {}) | sections.get(name, {}) for name in _BASE.keys() | sections.keys()})
