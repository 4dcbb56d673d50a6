"""No process, shared-memory segment or port is left, whoever is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from shoal.cli.local.process_tree import descendants
from tests.helpers.demo import Demo, port_is_open, tiny_demo
from tests.helpers.processes import wait_gone

pytestmark = pytest.mark.timeout(300)

_QUICK = ("--steps", "100000", "--set", "rollout.prompts_per_step=4", "--set", "rollout.group_size=2", "--set", "rollout.max_new_tokens=4")


def _assert_nothing_left(demo: Demo, pids: list[int], address: str) -> None:
    assert wait_gone(pids, 30) == [], demo.log()
    assert demo.shared_memory() == []
    assert not port_is_open(address)


def _wait_end(demo: Demo) -> int:
    deadline = time.monotonic() + 60
    while demo.process.poll() is None:
        assert time.monotonic() < deadline, demo.log()
        time.sleep(0.05)
    return int(demo.process.returncode)


def test_demo_interrupted_leaves_nothing(tmp_path: Path) -> None:
    with tiny_demo(tmp_path, *_QUICK) as demo:
        demo.wait_for_step(2)
        pids, address = descendants(demo.process.pid), demo.rest_address()
        demo.process.send_signal(signal.SIGINT)
        assert _wait_end(demo) == 130
        _assert_nothing_left(demo, pids, address)


@pytest.mark.parametrize("victim", ["actor", pytest.param("coordinator", marks=pytest.mark.slow)])
def test_demo_with_a_killed_service_fails_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    text = {"actor": "-m shoal_trainer --role actor", "coordinator": "-m shoal_coordinator"}[victim]
    with tiny_demo(tmp_path, *_QUICK) as demo:
        demo.wait_for_step(2)
        pids, address = descendants(demo.process.pid), demo.rest_address()
        os.kill(demo.find(text), signal.SIGKILL)
        assert _wait_end(demo) == 1
        assert victim in demo.output.read_text()
        _assert_nothing_left(demo, pids, address)


def test_demo_goes_on_after_engine_and_reward_are_killed_and_leaves_nothing_when_the_command_is(tmp_path: Path) -> None:
    with tiny_demo(tmp_path, *_QUICK) as demo:
        demo.wait_for_step(2)
        os.kill(demo.find("shoal_reward --config"), signal.SIGKILL)
        os.kill(demo.find_engine(), signal.SIGKILL)
        step = int(demo.status()["step"])
        demo.wait_for_step(step + 4)
        assert demo.status()["policy_version"] > step
        pids, address = descendants(demo.process.pid), demo.rest_address()
        demo.process.kill()
        _assert_nothing_left(demo, pids, address)


def test_demo_leaves_nothing_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with tiny_demo(tmp_path, *_QUICK) as demo:
        demo.wait_for_step(1)
        pids, address = descendants(demo.process.pid), demo.rest_address()
        os.kill(demo.find("shoal.cli.local.supervisor"), signal.SIGKILL)
        assert _wait_end(demo) == 1
        _assert_nothing_left(demo, pids, address)
