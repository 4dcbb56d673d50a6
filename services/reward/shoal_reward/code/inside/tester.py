"""Role of a sandboxed process: the tests. The answer runs in another process, which sees arguments and gives values.

The verdict goes through a pipe that the answer's process does not have.
"""

from __future__ import annotations

import ast
import os
import sys
import types

from shoal_reward.code.inside.remote import Remote
from shoal_reward.code.inside.wire import receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shoal_reward.code.inside.wire import Message

_MAX_ERROR_CHARS = 200
_PASSED: Message = {"passed": True, "text": ""}


def play(plan: dict[str, Any]) -> None:
    """Run one test per message until the pipe ends."""
    first = receive(plan["requests"], plan["max_request_bytes"])
    remote = Remote(
        requests=plan["answer_requests"], replies=plan["answer_replies"], names=first["names"], max_reply_bytes=plan["max_reply_bytes"]
    )
    while True:
        try:
            message = receive(plan["requests"], plan["max_request_bytes"])
        except EOFError:
            os._exit(0)
        verdict = _run(remote, message["test"], message["entry_point"])
        send(plan["replies"], verdict | {"is_broken": remote.is_broken})


def _run(remote: Remote, source: str, entry_point: str | None) -> Message:
    """Run a test in names of its own; it passes by coming to its end, or by an exit without an error (unittest.main)."""
    try:
        tree = ast.parse(source, "tests.py")
        names = remote.names_in(tree, entry_point)
    except Exception as error:  # noqa: BLE001 - the answer's names are the answer's fault
        return _failed(error)
    try:
        # unittest looks for its cases in the module of this name.
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        main.__dict__.update(names)
        exec(compile(tree, "tests.py", "exec"), main.__dict__)  # noqa: S102 - what this process is for
    except SystemExit as error:
        return _PASSED if error.code in (None, 0, False) else _failed(error)
    except BaseException as error:  # noqa: BLE001 - whatever ends a test early fails it
        return _failed(error)
    return _PASSED


def _failed(error: BaseException) -> Message:
    return {"passed": False, "text": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}
