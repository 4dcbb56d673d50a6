"""A coordinator that is killed at any moment: what is active is what the log says, and what was acknowledged stands."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from shoal_coordinator.rewards.audit_log import LOG_NAME
from shoal_coordinator.rewards.route_stages import RouteStage

from tests.helpers.route_fakes import open_book

ROOT = Path(__file__).parents[4]


def kill_after(folder: Path, seed: int, num_lines: int, delay_s: float) -> list[str]:
    """Run a process that changes the book, and kill it some time after so many lines; all that it printed."""
    command = [sys.executable, "-m", "tests.helpers.route_process", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(num_lines)]
        threading.Timer(delay_s, process.kill).start()
        lines += process.stdout.readlines()
    assert process.returncode == -9
    # A killed process may leave half a line.
    return [line.strip() for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_book_of_a_killed_process_is_what_its_log_says(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for round_number in range(2):
        printed = kill_after(tmp_path, 10 * seed + round_number, dice.randrange(1, 12), dice.random() * 0.02)
        last = [int(line.split()[1]) for line in printed if line.startswith("active")][-1:]
        tried = int(printed[-1].split()[1]) if printed and printed[-1].startswith("try") else None
        lines = (tmp_path / LOG_NAME).read_bytes().split(b"\n")[:-1]
        book = open_book(tmp_path)
        book.close()
        assert book.active_number == json.loads(lines[-1])["active"]
        assert [record.revision.number for record in book.in_stage(RouteStage.ACTIVE)] == [book.active_number]
        assert not last or book.active_number in (last[0], tried)
