"""Start of a sandboxed process: gives up every right that it does not need, says what holds, then plays its role.

Run as a file by `shoal_reward.code.sandbox`, with a plan (JSON) as its argument.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shoal_reward.code.inside.landlock import Ruleset

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/urandom", "/dev/random", "/dev/zero")
_FAILED = 3


def main() -> None:
    """Confine this process, say so, and run the role of the plan."""
    plan = json.loads(sys.argv[1])
    del sys.argv[1:], sys.orig_argv[:]
    package_root = os.path.abspath(__file__).rsplit("/", 4)[0]
    sys.path.insert(0, package_root)
    wire = importlib.import_module("shoal_reward.code.inside.wire")
    try:
        play = importlib.import_module(f"shoal_reward.code.inside.{plan['role']}").play
        holds = _confine(plan, package_root)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the starter must hear that there is no sandbox
        wire.send(plan["replies"], {"failed": f"{type(error).__name__}: {error}"})
        os._exit(_FAILED)
    wire.send(plan["replies"], {"ready": holds})
    play(plan)


def _confine(plan: dict[str, Any], package_root: str) -> dict[str, Any]:
    limits = importlib.import_module("shoal_reward.code.inside.limits")
    landlock = importlib.import_module("shoal_reward.code.inside.landlock")
    confine = importlib.import_module("shoal_reward.code.inside.confine")
    sys.path.remove(package_root)
    sys.path.extend(plan["library_folders"])
    version = landlock.abi() if plan["landlock"] else 0
    ruleset = _ruleset(landlock, version, plan) if version else None
    if plan["user"] is not None:
        limits.become(plan["user"])
    _tie_to(plan["parent"])
    confine.forbid_new_privileges()
    limits.apply_limits(plan["limits"])
    if ruleset is not None:
        ruleset.apply()
    return {"user": os.getuid(), "landlock": version, "seccomp": _filter(confine, limits, plan)}


def _ruleset(landlock: ModuleType, version: int, plan: dict[str, Any]) -> Ruleset:
    ruleset: Ruleset = landlock.Ruleset(version)
    ruleset.allow_reading([*sys.path, os.path.join(sys.base_prefix, "lib"), *_SYSTEM_PATHS, *_DEVICES])
    ruleset.allow_files_in(plan["folder"])
    ruleset.allow_writing(os.devnull)
    return ruleset


def _tie_to(parent: int) -> None:
    # After the change of user, which clears it; another user's memory could be read from /proc as long as this one is dumpable.
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent:
        os._exit(_FAILED)


def _filter(confine: ModuleType, limits: ModuleType, plan: dict[str, Any]) -> bool:
    try:
        confine.install_filter(bytes.fromhex(plan["filter"]))
    except OSError:
        if not plan["is_weaker_allowed"]:
            raise
        # Its child processes would outlive it and whoever started it: then it must not have a second task at all.
        limits.apply_limits({"tasks": plan["tasks_without_filter"]})
        return False
    return True


if __name__ == "__main__":
    main()
