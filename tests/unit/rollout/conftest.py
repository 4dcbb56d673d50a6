"""A sink over a scripted engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helpers.sink_rig import SinkRig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SinkRig]:
    opened = SinkRig(tmp_path)
    yield opened
    opened.engine.failures, opened.engine.gates = {}, {}
    await opened.close()
    assert os.listdir(tmp_path) == [], "staging was left behind"
