"""A hundred swaps of the reward at random moments while groups flow, in every way of collecting them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.swap_checks import check_load, counts
from tests.helpers.swap_load import SwapLoad
from tests.helpers.swap_modes import Mode, several_components

pytestmark = pytest.mark.timeout(120)

NUM_SWAPS = 100
SEVERAL: dict[str, Any] = {
    "reward": {"sources": {"sums": "exact", "words": "steps"}},
    "components": several_components,
    "shares_scorers": True,
}
MODES = [
    Mode(name="plain", hangs=True),
    Mode(name="dynamic_sampling", max_refills=3),
    Mode(name="remax", has_greedy=True),
    Mode(name="components", **SEVERAL),
    Mode(name="evaluating", evaluates=True),
    Mode(name="failing", failing_share=0.05),
    Mode(name="breaking", breaks=True),
    Mode(name="everything", **SEVERAL, has_greedy=True, max_refills=3, failing_share=0.02),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
async def test_no_group_mixes_revisions_and_no_record_is_lost_or_scored_twice(tmp_path: Path, redis_url: str, mode: Mode) -> None:
    async with SwapLoad(tmp_path, redis_url, mode, seed=5) as load:
        await load.run(NUM_SWAPS)
    check_load(load)
    seen = counts(load)
    assert seen["swaps"] >= NUM_SWAPS
    assert all(seen[name] > 0 for name in ("rollbacks", "drained", "shadows", "shadow_calls", "groups", "records")), seen
    assert bool(mode.breaks) == bool(seen["pauses"]), seen
    assert bool(mode.failing_share) == bool(seen["failed_calls"]), seen
