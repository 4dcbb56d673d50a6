"""Ties the engine's processes to the server, so that a server killed with -9 leaves no engine behind.

vLLM loads this plugin (`vllm.general_plugins`) in the server, in the engine core and in every worker. Spawned children tie themselves when
they load it; forked ones (see `engine_start`) inherit the loaded state, therefore a fork hook does it for them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from shoal.process import SUPERVISED_VARIABLE, die_with_parent

OWNER_VARIABLE = "SHOAL_ENGINE_OWNER"
"""Set by the server to "1": engine processes die with it, supervised or not."""
_forking_pid = 0


def register() -> None:
    """Entry point of the plugin; does nothing outside of a rollout server."""
    if os.environ.get(OWNER_VARIABLE) != "1" or not sys.platform.startswith("linux"):
        return
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _die_with(parent.pid)
    os.register_at_fork(before=_remember, after_in_child=_tie_forked_child)


def _remember() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _tie_forked_child() -> None:
    _die_with(_forking_pid)


def _die_with(parent_pid: int) -> None:
    """Ask for SIGKILL at the parent's death; the parent may have died before this call, then nobody would send it."""
    was_supervised = os.environ.get(SUPERVISED_VARIABLE)
    os.environ[SUPERVISED_VARIABLE] = "1"
    try:
        die_with_parent(signal.SIGKILL)
    finally:
        if was_supervised is None:
            del os.environ[SUPERVISED_VARIABLE]
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
