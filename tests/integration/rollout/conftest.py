"""Engines inside the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_rig import EngineRig
from tests.helpers.inprocess_engine import ENGINE_ENVIRONMENT


@pytest.fixture
def engine_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM run in this process."""
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def start_rig(engine_environment: None) -> Iterator[Callable[..., EngineRig]]:
    """Start engines, one after another; closes the last one at the end of the test."""
    rigs: list[EngineRig] = []

    def start(folder: Path, dtype: str = "float32") -> EngineRig:
        rigs.append(EngineRig(folder, dtype))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.engine.close()
