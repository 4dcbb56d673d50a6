"""Where the kernel, or a container's own filter, forbids a part of the sandbox. A real filter stands in for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEM_PYTHON = "/usr/bin/python3.11"
FORBID = """
import struct
from shoal_reward.code.inside.confine import forbid_new_privileges, install_filter
LOAD, EQUAL, RETURN, ALLOW, EPERM, ENOSYS = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001, 0x00050026
def forbid(*names):
    steps = [(LOAD, 0, 0, 0)]
    if "landlock" in names:
        steps += [(EQUAL, 0, 1, 444), (RETURN, 0, 0, ENOSYS)]
    if "seccomp" in names:
        steps += [(EQUAL, 0, 1, 317), (RETURN, 0, 0, EPERM)]
        steps += [(EQUAL, 0, 3, 157), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 22), (RETURN, 0, 0, EPERM)]
    steps.append((RETURN, 0, 0, ALLOW))
    forbid_new_privileges()
    install_filter(b"".join(struct.pack("=HBBI", *step) for step in steps))
"""
COMMON = """
import logging, os
from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError
from shoal_reward.kinds import build_scorer
from tests.helpers.code_answers import passes, prints, refused, settings_with
def build(**settings):
    return build_scorer("code", ScorerDefinition(kind="code", settings=settings))
logging.basicConfig(format="%(message)s")
"""
RIGHT, WRONG, TEST = "def f(): return 1", "def f(): return 2", "assert f() == 1"

x86_64_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")


def run(code: str, *, python: str = sys.executable, before: tuple[str, ...] = (), path: str | None = None) -> list[str]:
    """Lines that a fresh interpreter prints, its log included."""
    environment = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)) if path is None else path}
    done = subprocess.run([*before, python, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@x86_64_only
def test_without_a_filter_no_scorer_is_built_unless_it_is_allowed() -> None:
    code = FORBID + COMMON + f"""
forbid("seccomp")
try:
    build()
except ConfigError as error:
    print("refused:", error)
build(check_at_start=False)
build(allow_weaker_sandbox=True)
weaker = settings_with(weaker=True)
print(passes({RIGHT!r}, {TEST!r}, weaker), passes({WRONG!r}, {TEST!r}, weaker))
for attempt in ("import os\\nos.fork()", "import threading\\nthreading.Thread(target=print).start()"):
    print(refused(attempt, "BlockingIOError" if "fork" in attempt else "RuntimeError", weaker))
"""  # fmt: skip
    refusal, verdicts, *tasks, warning = run(code)
    assert "system call filter" in refusal
    assert "allow_weaker_sandbox" in refusal
    assert verdicts == "True False"
    if os.getuid() == 0:
        assert tasks == ["True", "True"]
    assert "without a system call filter" in warning


@x86_64_only
def test_without_landlock_it_goes_on_and_says_so_once() -> None:
    code = FORBID + COMMON + f"""
forbid("landlock")
build()
print(passes({RIGHT!r}, {TEST!r}), passes({WRONG!r}, {TEST!r}), refused("import os\\nos.fork()"), refused("open('/etc/shadow')"))
print(prints("open('/tmp/x-of-shoal-code', 'w')", ""))
"""  # fmt: skip
    verdicts, _, warning = run(code)
    assert verdicts == "True False True True"
    assert "without Landlock" in warning
    Path("/tmp/x-of-shoal-code").unlink(missing_ok=True)


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="gives up capabilities, which needs some")
def test_root_that_may_not_change_its_user_is_refused() -> None:
    code = COMMON + "try:\n    build()\nexcept ConfigError as error:\n    print(error)\n"
    (refusal,) = run(code, before=("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"))
    assert "user other than root" in refusal


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None or not Path(SYSTEM_PYTHON).exists(), reason="changes the user")
def test_it_holds_for_a_user_without_any_capability() -> None:
    code = COMMON + f"""
build()
print(passes({RIGHT!r}, {TEST!r}), passes({WRONG!r}, {TEST!r}), prints("open('a', 'w').write('1')\\nprint(open('a').read())", "1"))
print(refused("import os\\nos.fork()"), refused(f"import os\\nos.kill({{os.getpid()}}, 9)"))
print(prints("import threading\\nt = threading.Thread(target=print, args=(5,))\\nt.start()\\nt.join()", "5"))
"""  # fmt: skip
    drop = ("setpriv", "--reuid=10001", "--regid=10001", "--clear-groups", "--bounding-set=-all", "--no-new-privs")
    packages = Path(pytest.__file__).parent.parent
    root = Path(__file__).parents[4]
    path = os.pathsep.join(map(str, (root, root / "src", root / "services/reward", packages)))
    if (
        not os.access(packages, os.R_OK)
        or subprocess.run([*drop, SYSTEM_PYTHON, "-c", "import pydantic"], env={"PYTHONPATH": path}).returncode
    ):
        pytest.skip("the packages here cannot be used by another user's interpreter")
    assert run(code, python=SYSTEM_PYTHON, before=drop, path=path)[:3] == ["True False True", "True True", "True"]
