"""Nothing of a sandbox outlives the process that started it, nor the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shoal_reward.code.sandbox import SandboxedProcess, remove_left_behind

from tests.helpers.code_answers import checked, settings_with

ENDLESS = "while True:\n    pass\n"
STARTER = f"""
from tests.helpers.code_answers import checked
checked({ENDLESS!r}, TESTS)
"""
PROGRAM, SCRIPT = [{"input": "", "output": "1"}], "assert f() == 1"
DEADLINE_S = 60


@pytest.fixture(params=[PROGRAM, SCRIPT], ids=["program", "script"])
def starter(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs an endless answer, and leads a group of its own."""
    code = STARTER.replace("TESTS", repr(request.param))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=environment)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "group"])
def test_a_killed_grader_leaves_no_sandboxed_process(starter: subprocess.Popen[bytes], kill: Callable[[int, int], None]) -> None:
    (answer, *_) = waited_for(lambda: [child for child in children(starter.pid) if is_busy(child)])
    everyone = children(starter.pid)
    assert answer in everyone
    kill(starter.pid, signal.SIGKILL)
    starter.wait()
    waited_for(lambda: all(has_ended(process) for process in everyone))
    (folder,) = {path.name.split("-")[2] for path in left_by(starter.pid)}
    assert folder == str(starter.pid)
    remove_left_behind()
    assert left_by(starter.pid) == []


def test_a_sandbox_that_is_left_is_over_and_its_folder_gone() -> None:
    others = set(children(os.getpid()))
    with SandboxedProcess("answer", settings_with(), num_tests=1) as process:
        folder, (child,) = Path(process.folder), set(children(os.getpid())) - others
        assert folder.is_dir()
        (folder / "file").write_text("")
    assert not folder.exists()
    assert not Path(f"/proc/{child}").exists()
    process.close()


def test_folders_of_the_living_stay() -> None:
    with SandboxedProcess("answer", settings_with(), num_tests=1) as process:
        remove_left_behind()
        assert Path(process.folder).is_dir()


def test_descriptors_are_given_back() -> None:
    tests: list[object] = [[{"input": "", "output": "1"}] * 2, [{"function": "f", "output": 1}], "assert f() == 1", "assert f() == 2"]
    before = set(os.listdir("/proc/self/fd"))
    for each in tests:
        checked("print(1)\ndef f(): return 1", each)
        checked("1 / 0", each)
    # Whatever earlier tests left to the garbage collector may go meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before


def left_by(process: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"shoal-code-{process}-*"))


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_busy(process: int) -> bool:
    """Confined, and running the answer for a while: its clock ticks."""
    has_filter = "Seccomp:\t2" in Path(f"/proc/{process}/status").read_text()
    return has_filter and int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11]) > 20


def has_ended(process: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def waited_for(condition: Callable[[], object]) -> list[int]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found if isinstance(found, list) else []
        time.sleep(0.01)
    raise AssertionError("it did not come about")
