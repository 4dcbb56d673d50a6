"""Role of a sandboxed process: the answer as a module, whose functions another process calls.

Expected values never come here. All that the answer can do to a verdict is to give values.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable

from shoal_reward.code.inside.wire import decode, encode, pack, receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shoal_reward.code.inside.wire import Message, Value

_MODULE = "answer"
_MAX_ERROR_CHARS = 200


def play(plan: dict[str, Any]) -> None:
    """Load the source that comes through the pipe, then do what is asked until the pipe ends."""
    receiver = Receiver(requests=plan["requests"], replies=plan["replies"], max_reply_bytes=plan["max_reply_bytes"])
    receiver.load(receive(plan["requests"], plan["max_request_bytes"])["source"])
    while True:
        try:
            message = receive(plan["requests"], plan["max_request_bytes"])
        except EOFError:
            os._exit(0)
        receiver.answer(message)


class Receiver:
    """Does what the other side asks of the answer, and keeps the objects that are no plain values."""

    def __init__(self, *, requests: int, replies: int, max_reply_bytes: int) -> None:
        """Args: requests, replies: pipes. max_reply_bytes: longer replies become errors."""
        self._requests = requests
        self._replies = replies
        self._max_reply_bytes = max_reply_bytes
        self._names: dict[str, Any] = {}
        self._kept: list[object] = []
        self._numbers: dict[int, int] = {}

    def load(self, source: str) -> None:
        """Run the source as a module and say which names it has, or which error it ended with."""
        module = types.ModuleType(_MODULE)
        sys.modules[_MODULE] = module
        self._names = module.__dict__
        try:
            exec(compile(source, "answer.py", "exec"), self._names)  # noqa: S102 - what this process is for
            reply: Message = {"names": {name: _origin(name, value) for name, value in list(self._names.items()) if isinstance(name, str)}}
        except BaseException as error:  # noqa: BLE001 - any end of it is the answer's, sys.exit too
            reply = _raised(error)
        self._send(reply)

    def answer(self, message: Message) -> None:
        """Do one operation and reply with its value or its error."""
        try:
            target = self._find(message["on"])
            arguments = [decode(each, self._find) for each in message["args"]]
            named = {name: decode(each, self._find) for name, each in message["kwargs"].items()}
            value = _OPERATIONS[message["do"]](target, *arguments, **named)
            reply: Message = {"value": encode(value, self._keep), "changed": self._changed(message["args"], arguments)}
        except BaseException as error:  # noqa: BLE001 - any end of it is the answer's, sys.exit too
            reply = _raised(error)
        self._send(reply)

    def _send(self, reply: Message) -> None:
        packed = pack(reply)
        if len(packed) > self._max_reply_bytes:
            packed = pack(_raised(OverflowError(f"a value of {len(packed)} bytes, at most {self._max_reply_bytes} are taken")))
        view = memoryview(packed)
        while view:
            view = view[os.write(self._replies, view) :]

    def _changed(self, before: list[object], arguments: list[object]) -> list[list[object]]:
        """Arguments that a function changed in place, by position."""
        after = {at: encode(value, self._keep) for at, value in enumerate(arguments) if isinstance(value, (list, dict, set))}
        return [[at, value] for at, value in after.items() if value != before[at]]

    def _keep(self, value: object) -> Message:
        # Kept objects stay alive, so that no other has their id.
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        return {"handle": number}

    def _find(self, reference: Message) -> Value:
        ((kind, content),) = reference.items()
        if kind == "handle":
            return self._kept[content]
        if kind == "callback":
            return lambda *arguments: self._call_back(content, arguments)
        return self._named(content)

    def _named(self, path: str) -> Value:
        """Find a name; a class in the middle of a dotted one is instantiated (`Solution.two_sum`)."""
        first, *rest = path.split(".")
        if first not in self._names:
            raise NameError(f"the answer has no {first!r}")
        found = self._names[first]
        for name in rest:
            found = getattr(found() if isinstance(found, type) else found, name)
        return found

    def _call_back(self, number: int, arguments: tuple[object, ...]) -> object:
        self._send({"call_back": number, "args": [encode(each, self._keep) for each in arguments]})
        while "returned" not in (message := receive(self._requests, self._max_reply_bytes)):
            if "raised" in message:
                raise RuntimeError(message["raised"])
            # The test's function uses an object of the answer.
            self.answer(message)
        return decode(message["returned"], self._find)


def _origin(name: str, value: object) -> Message:
    """What a name stands for: a library's object is imported again by the other side, not used through this one."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    module = getattr(value, "__module__", None)
    origin: Message = {"callable": callable(value)}
    if isinstance(module, str) and module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value:
        origin |= {"module": module, "name": name}
    return origin


def _raised(error: BaseException) -> Message:
    """An error by its nearest built-in class, which the other side raises; an exit is none that may end a test well."""
    if not isinstance(error, Exception):
        return {"raised": "RuntimeError", "text": f"the answer ended with {type(error).__name__}"}
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    return {"raised": kinds[0], "text": _text(error)}


def _text(error: Exception) -> str:
    try:
        return str(error)[:_MAX_ERROR_CHARS]
    except Exception:  # noqa: BLE001 - the answer's own __str__
        return type(error).__name__


def _call(target: Callable[..., object], /, *arguments: object, **named: object) -> object:
    return target(*arguments, **named)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": _call,
    "value": lambda target: target,
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "set_item": lambda target, key, value: target.__setitem__(key, value),
    "size": len,
    "text": str,
    "repr": repr,
    "iterate": iter,
    "next": next,
    "equals": lambda target, other: bool(target == other),
    "is_instance": lambda target, value: isinstance(value, target),
}
