"""Starts processes by forking, by default those of the failure matrix: one process imports torch, gRPC and Shoal, its children need not.

Other roles are arguments, ROLE=MODULE; the module has a `main`. No gRPC object and no thread exists in it. It is driven over its standard
input and output, a JSON object per line; when its input ends, it kills what still runs and ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from shoal.process import set_parent_death_signal

ROLES = {
    "coordinator": "tests.helpers.push_matrix_coordinator",
    "rollout": "tests.helpers.push_matrix_rollout",
    "rank": "tests.helpers.push_matrix_rank",
}


def main() -> None:
    """Serve until the input ends."""
    wanted = dict(argument.split("=", 1) for argument in sys.argv[1:]) or ROLES
    roles = {role: importlib.import_module(module) for role, module in wanted.items()}
    gc.collect()
    gc.freeze()
    children: dict[int, int | None] = {}
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "role" in request:
            pid = _fork(roles[request["role"]].main, request["arguments"], Path(request["log"]))
            children[pid] = None
            _answer({"pid": pid})
        else:
            _reap(children)
            _answer({"ended": {str(pid): code for pid, code in children.items() if code is not None}})
    _reap(children)
    for pid in [pid for pid, code in children.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(run: Any, arguments: dict[str, Any], log: Path) -> int:  # noqa: ANN401 - a role's main
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        set_parent_death_signal()
        _redirect(log)
        code = run(**arguments)
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _reap(children: dict[int, int | None]) -> None:
    for pid in [pid for pid, code in children.items() if code is None]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children[pid] = os.waitstatus_to_exitcode(status)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
