"""A supervised process dies with its parent; an unsupervised one is left alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from shoal.process import SUPERVISED_VARIABLE, SUPERVISOR_PID_VARIABLE, die_with_parent

_CHILD = "import signal; from shoal.process import die_with_parent; print(die_with_parent(), flush=True); signal.pause()"
_PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_die_with_parent_does_nothing_unsupervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERVISED_VARIABLE, raising=False)
    assert die_with_parent() is False


@pytest.mark.timeout(30)
def test_die_with_parent_ends_the_child_of_a_killed_parent() -> None:
    environment = os.environ | {SUPERVISED_VARIABLE: "1"}
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    descriptor = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert select.select([descriptor], [], [], 10.0)[0], "the child outlived its parent"
    finally:
        os.close(descriptor)


@pytest.mark.timeout(30)
def test_die_with_parent_notices_a_supervisor_that_is_already_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = os.environ | {SUPERVISED_VARIABLE: "1", SUPERVISOR_PID_VARIABLE: str(gone.pid)}
    child = subprocess.run([sys.executable, "-c", _CHILD], env=environment, check=False)
    assert child.returncode == -signal.SIGKILL
