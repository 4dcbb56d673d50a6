"""Random sequences of training, pushes, faults and restarts: what a server serves is always one complete version; see `Walk`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.push_walk import Walk

NUM_STEPS = 40


async def take(folder: Path, seed: int, num_steps: int) -> None:
    walk = Walk(folder, seed)
    await walk.start()
    try:
        for _ in range(num_steps):
            await walk.step()
    except Exception as error:
        error.add_note(f"seed {seed}, steps:\n  " + "\n  ".join(walk.steps))
        raise
    finally:
        await walk.close()
    assert await walk.left_behind() == []


@pytest.mark.parametrize("seed", range(5))
async def test_every_server_serves_one_complete_version_whatever_happens(tmp_path: Path, seed: int) -> None:
    await take(tmp_path, seed, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
async def test_every_server_serves_one_complete_version_whatever_happens_for_long(tmp_path: Path, seed: int) -> None:
    await take(tmp_path, seed, 3 * NUM_STEPS)
