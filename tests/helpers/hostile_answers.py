"""Answers that try to take a reward service down, as rows for `shoal reward score`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

_RETURNS_1 = ["assert f() == 1"]
_MEGABYTE = 1_000_000

CODE: Mapping[str, tuple[str, list[Any], float]] = {
    "right": ("def f(): return 1", _RETURNS_1, 1.0),
    "threads": (
        "import threading\ndef f():\n    ts = [threading.Thread(target=int) for _ in range(4)]\n"
        "    [t.start() for t in ts]\n    [t.join() for t in ts]\n    return 1",
        _RETURNS_1,
        1.0,
    ),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", _RETURNS_1, 0.0),
    "patient fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", _RETURNS_1, 0.0),
    "thread bomb": ("import _thread, time\nwhile True: _thread.start_new_thread(time.sleep, (99,))", _RETURNS_1, 0.0),
    "endless loop": ("def f():\n    while True: pass", _RETURNS_1, 0.0),
    "deaf loop": ("import signal\nfor s in range(1, 9): signal.signal(s, signal.SIG_IGN)\nwhile True: pass", _RETURNS_1, 0.0),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", _RETURNS_1, 0.0),
    "disk bomb": ("import os\nf = os.open('x', os.O_CREAT | os.O_RDWR)\nwhile True: os.write(f, bytes(1 << 20))", _RETURNS_1, 0.0),
    "100 MB output": ("for _ in range(100): print('x' * 1_000_000)", [{"input": "", "output": "x"}], 0.0),
    "100 MB value": ("def f(): return 'x' * 100_000_000", [{"function": "f", "args": [], "output": "x"}], 0.0),
    "kills the service": ("import os, signal\nos.kill(1, signal.SIGKILL)\ndef f(): return 1", _RETURNS_1, 0.0),
    "kills all": ("import os, signal\nos.kill(-1, signal.SIGKILL)\ndef f(): return 1", _RETURNS_1, 0.0),
    "10 MB of code": ("def f(): return 1" + "#" * 10 * _MEGABYTE, _RETURNS_1, 0.0),
    "null byte": ("def f(): return 1\0", _RETURNS_1, 0.0),
    "socket": ("import socket\nsocket.socket()\ndef f(): return 1", _RETURNS_1, 0.0),
    "program": ("import subprocess\nsubprocess.run(['id'])\ndef f(): return 1", _RETURNS_1, 0.0),
}
"""Name -> answer, tests of its row, and what it is worth."""

TEXTS: Mapping[str, tuple[str, float]] = {
    "right": (r"so it is \boxed{12}", 1.0),
    "10 MB": ("x" * 10 * _MEGABYTE, 0.0),
    "10 MB of digits": ("1" * 10 * _MEGABYTE, 0.0),
    "10 MB in a box": (r"\boxed{" + "1+" * 5 * _MEGABYTE + "1}", 0.0),
    "null bytes": ("\0" * 1000, 0.0),
    "right behind null bytes": ("\0" * 10 + r"\boxed{12}", 1.0),
    "100,000 open braces": (r"\boxed{" + "{" * 100_000, 0.0),
    "100,000 nested braces": (r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}", 0.0),
    "100,000 fractions": (r"\boxed{" + r"\frac{" * 100_000 + "}", 0.0),
    "power tower": (r"\boxed{9^{9^{9^{9^{9}}}}}", 0.0),
    "blanks": (r"\boxed{" + " " * _MEGABYTE + "x", 0.0),
}
"""Name -> response to a row whose answer is 12, and what `math` gives for it."""


def code_rows() -> str:
    """JSONL for the scorer `code`, in the order of CODE."""
    return _lines({"prompt": name, "response": f"```python\n{code}\n```", "tests": tests} for name, (code, tests, _) in CODE.items())


def text_rows() -> str:
    """JSONL for the scorers of text, in the order of TEXTS."""
    return _lines({"prompt": name, "response": text, "answer": "12"} for name, (text, _) in TEXTS.items())


def _lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
