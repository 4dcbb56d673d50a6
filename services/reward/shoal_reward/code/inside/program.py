"""Role of a sandboxed process: the answer as a program, its standard input and output being the test's."""

from __future__ import annotations

import os
import sys
import types

from shoal_reward.code.inside.wire import receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def play(plan: dict[str, Any]) -> None:
    """Run the source that comes through the pipe as `__main__`; its exit status is this process's."""
    source = receive(plan["requests"], plan["max_request_bytes"])["source"]
    os.close(plan["requests"])
    os.close(plan["replies"])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(source, "answer.py", "exec"), main.__dict__)  # noqa: S102 - what this process is for
