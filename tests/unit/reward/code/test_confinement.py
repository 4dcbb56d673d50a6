"""What an answer may not do, each tried in a real sandbox."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from shoal_reward.code.inside import landlock

from tests.helpers.code_answers import passes, prints, refused, settings_with

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")


REACHING_OUT = [
    "import os\nos.fork()",
    "import os\nos.forkpty()",
    "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "import os\nos.execv('/bin/true', ['true'])",
    "import subprocess\nsubprocess.run(['/bin/true'])",
    "import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()",
    "import socket\nsocket.socket()",
    "import socket\nsocket.socket(socket.AF_UNIX)",
    "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "import socket\nsocket.create_connection(('127.0.0.1', 1))",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.kill(1, 0)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.kill(0, 9)",
    "import os\nos.killpg(0, 9)",
    "import os\nos.setuid(0)",
    "import os\nos.setsid()",
    "import os\nos.setpgid(0, 0)",
    "import os\nos.nice(-1)",
    "import os\nos.chroot('.')",
    "import os\nos.mkdir('d')",
    "import os\nos.symlink('/etc/passwd', 'link')",
    "open('a', 'w').close()\nimport os\nos.link('a', 'b')",
    "open('a', 'w').close()\nimport os\nos.chmod('a', 0)",
    "import os\nos.chmod('.', 0)",
    "import os\nos.mkfifo('a')",
    "import os\nos.memfd_create('a')",
    "import os\nos.sched_setaffinity(0, {0})",
    "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))",
    "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))",
    "import fcntl\nfcntl.fcntl(0, fcntl.F_SETOWN, 1)",
    "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20)",
    "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')",
]


def test_calls_that_reach_out_are_refused() -> None:
    program = f"""
for attempt in {REACHING_OUT!r}:
    try:
        exec(attempt, {{}})
    except (PermissionError, ValueError) as error:
        # setrlimit raises ValueError for EPERM.
        if type(error) is ValueError and "setrlimit" not in attempt:
            print(attempt, repr(error))
    except BaseException as error:
        print(attempt, repr(error))
    else:
        print(attempt, "worked")
print("done")
"""
    assert prints(program, "done")


CALLS = {"ptrace": 101, "mount": 165, "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248, "io_uring_setup": 425}
CALLS |= {"process_vm_readv": 310, "open_by_handle_at": 304, "userfaultfd": 323, "perf_event_open": 298, "pidfd_open": 434, "tkill": 200}
CALLS |= {
    "shmget": 29,
    "mknod": 133,
    "reboot": 169,
    "swapon": 167,
    "init_module": 175,
    "mq_open": 240,
    "execveat": 322,
    "vfork": 58,
    "seccomp": 317,
}
CALLS |= {
    "process_madvise": 440,
    "pidfd_getfd": 438,
    "landlock_create_ruleset": 444,
    "setrlimit": 160,
    "x32_getpid": 0x40000000 + 39,
    "next": 1000,
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_calls_without_a_name_in_python_are_refused() -> None:
    program = f"""
import ctypes
library = ctypes.CDLL(None, use_errno=True)
for name, number in {CALLS!r}.items():
    ctypes.set_errno(0)
    if library.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
print(library.syscall(435, 0, 0), ctypes.get_errno())
for option in (1, 4, 22, 23, 24, 28, 36, 47):
    if library.prctl(option, 0, 0, 0, 0) != -1:
        print("prctl", option)
print("done")
"""
    assert prints(program, "-1 38\ndone")


@needs_landlock
def test_nothing_outside_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    paths = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ", f"/proc/{os.getpid()}/environ"]
    paths += [f"/proc/{os.getpid()}/mem", "/proc/self/maps", "/proc/cpuinfo", str(secret), __file__, "/dev/mem", "/dev/kmsg"]
    program = f"""
import os
for path in {paths!r}:
    try:
        print(path, open(path, "rb").read(10))
    except OSError:
        pass
for path in ("/", "/tmp", "/proc", "/etc", "/root", "/home", "/var", "/work", {str(tmp_path)!r}):
    try:
        print(path, os.listdir(path))
    except OSError:
        pass
print("done", len(os.listdir(".")))
"""
    assert prints(program, "done 0")


@needs_landlock
def test_nothing_outside_can_be_written_or_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("there")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    program = f"""
import os
for attempt in (
    lambda: open({str(victim)!r}, "w"), lambda: os.unlink({str(victim)!r}), lambda: os.rename({str(victim)!r}, "here"),
    lambda: os.truncate({str(victim)!r}, 0), lambda: open({str(tmp_path)!r} + "/new", "w"), lambda: open("/tmp/shoal-new", "w"),
    lambda: open("/dev/shm/shoal-new", "w"), lambda: os.rmdir({str(tmp_path)!r}), lambda: open("../new", "w"),
):
    try:
        print(attempt())
    except OSError:
        pass
print("done")
"""
    assert prints(program, "done")
    assert victim.read_text() == "there"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


@pytest.mark.parametrize("is_landlocked", [True, False])
def test_the_user_of_an_answer_has_no_rights_without_landlock_either(tmp_path: Path, is_landlocked: bool) -> None:
    if os.getuid() != 0:
        pytest.skip("changes the user, which root can")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    attempt = "open({!r})"
    for path in ("/etc/shadow", str(secret), f"/proc/{os.getpid()}/environ"):
        assert refused(attempt.format(path), settings=settings_with(landlock=is_landlocked))
    assert prints(
        "import os\nprint(os.getuid() != 0, len(set(os.getresuid() + os.getresgid())), os.getgroups())",
        "True 1 []",
        settings_with(landlock=is_landlocked),
    )


def test_the_environment_is_empty_and_no_descriptor_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "secret")
    with socket.socket() as listener, tempfile.TemporaryFile() as file:
        for inherited in (listener.fileno(), file.fileno()):
            os.set_inheritable(inherited, True)
        program = """
import os, stat
print({name: value for name, value in os.environ.items() if not name.startswith("LC_")})
kinds = set()
for fd in range(100):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    kinds.add("folder" if stat.S_ISDIR(mode) else "device" if stat.S_ISCHR(mode) else "pipe" if stat.S_ISFIFO(mode) else "other")
print(kinds <= {"folder", "device", "pipe"})
"""
        assert prints(program, "{}\nTrue")


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("x = bytearray(4 << 30)", {}),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", {}),
        ("x = 'a'\nwhile True:\n    x += x", {}),
        ("x = 10 ** 10 ** 10", {"test_s": 1.0}),
        ("while True:\n    pass", {"test_s": 0.5}),
        ("while True:\n    pass", {"cpu_s": 1}),
        ("import time\ntime.sleep(60)", {"test_s": 0.5}),
        ("import os\nos.close(1)\nwhile True:\n    pass", {"test_s": 0.5}),
        ("input()\ninput()", {}),
        ("while True:\n    print('x' * 10000)", {}),
        ("import os\nwhile True:\n    os.write(1, b'x' * 100000)", {}),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", {"test_s": 1.0}),
        ("eval('[' * 100000)", {}),
        ("{" * 100_000, {}),
        ("import ctypes\nctypes.string_at(0)", {}),
        ("import signal, os\nos.kill(os.getpid(), signal.SIGSTOP)", {"test_s": 0.5}),
        ("import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
            "while True: pass", {"test_s": 0.5}),
        ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", {"test_s": 0.5}),
        ("import threading\nwhile True:\n    threading.Thread(target=threading.Event().wait).start()", {"test_s": 2.0}),
        ("import threading, os\nthreading.Thread(target=threading.Event().wait).start()", {"test_s": 0.5}),
        ("print('1')\nopen('a', 'wb').write(bytes(100 << 20))", {"file_bytes": 1 << 20}),
        ("import time\nfor n in range(50):\n    open(str(n), 'wb').write(bytes(1 << 19))\nprint(1, flush=True)\n"
            "time.sleep(0.2)", {"file_bytes": 1 << 20}),
        ("for n in range(5000):\n    open(str(n), 'wb').close()\nprint(1)", {"num_files": 10}),
    ],
)  # fmt: skip
def test_a_program_that_breaks_a_limit_fails_and_leaves_nothing(program: str, limits: dict[str, Any]) -> None:
    before = left_behind()
    assert not passes(program, [{"input": "", "output": "1"}], settings_with(**limits))
    assert left_behind() == before


def left_behind() -> tuple[list[str], set[str]]:
    """Folders of sandboxes of this process, and its children."""
    folders = sorted(path.name for path in Path(tempfile.gettempdir()).glob(f"shoal-code-{os.getpid()}-*"))
    children = {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}
    return folders, children


def test_threads_are_limited() -> None:
    program = """
import threading
event = threading.Event()
threads = []
try:
    for _ in range(1000):
        threads.append(threading.Thread(target=event.wait, daemon=True))
        threads[-1].start()
except RuntimeError:
    print(len(threads))
event.set()
"""
    # The main thread counts, and the last one did not start.
    if os.getuid() == 0:
        assert prints(program, "8", settings_with(threads=8))
    else:
        assert not prints(program, "", settings_with(threads=8))


def test_a_value_that_is_too_long_fails() -> None:
    limits = settings_with(output_bytes=10_000)
    assert not passes("def f(): return 'x' * 20_000", [{"function": "f", "output": "x" * 20_000}], limits)
    assert passes("def f(): return 'x' * 5_000", [{"function": "f", "output": "x" * 5_000}], limits)
    assert not passes("def f(): return 'x' * 20_000", "assert f()", limits)
    assert not passes("def f():\n    x = []\n    x.append(x)\n    return x", "assert f()")


def test_nested_values_are_no_fault_of_the_service() -> None:
    answer = "def f():\n    x = 1\n    for _ in range(900):\n        x = [x]\n    return x\n"
    assert not passes(answer, [{"function": "f", "output": 1}])
    deep = "import gc\ndef f():\n    (r,) = [e for e in gc.get_objects() if type(e).__name__ == 'Receiver']\n    import os\n"
    deep += "    body = b'{\"value\": ' + b'[' * 100000 + b']' * 100000 + b'}'\n"
    deep += "    os.write(r._replies, len(body).to_bytes(4, 'little') + body)\n"
    assert not passes(deep, [{"function": "f", "output": 1}])
    assert not passes(deep, "assert f()")


def test_libraries_can_be_given(tmp_path: Path) -> None:
    package = tmp_path / "libraries"
    package.mkdir()
    for folder in (tmp_path, package):
        folder.chmod(0o755)
    (package / "given.py").write_text("x = 3\n")
    (tmp_path / "other.py").write_text("x = 3\n")
    assert prints("import given\nprint(given.x)", "3", settings_with(folders=(str(package),)))
    assert refused("import given", "ModuleNotFoundError")
    assert refused("import pydantic", "ModuleNotFoundError")
    outside = "import os, given\nopen(os.path.join(os.path.dirname(given.__file__), '..', 'other.py'))"
    if landlock.abi():
        assert refused(outside, settings=settings_with(folders=(str(package),)))
