"""The answer's functions and objects as the tests see them: every use is a message to the process of the answer.

Legend: a handle stands for an object of the answer that is no plain value.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterator, Mapping

from shoal_reward.code.inside.wire import TooLongError, decode, encode, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoal_reward.code.inside.wire import Message, Value

# fmt: off
_LIBRARY = frozenset((
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math",
    "operator", "random", "re", "statistics", "string", "typing",
))
# fmt: on
"""Modules that a test may use although only the answer imports them."""


class Remote:
    """The other end of `answer.Receiver`."""

    def __init__(self, *, requests: int, replies: int, names: Mapping[str, Message], max_reply_bytes: int) -> None:
        """Args: requests, replies: pipes. names: what the answer said of its names. max_reply_bytes: longer replies end the test."""
        self._requests = requests
        self._replies = replies
        self._names = names
        self._max_reply_bytes = max_reply_bytes
        self._callbacks: list[Callable[..., object]] = []
        self.is_broken = False
        """The answer's process ended or wrote what is no message: nothing more can be asked of it."""

    def names_in(self, tree: ast.Module, entry_point: str | None) -> dict[str, object]:
        """What the names that a test uses stand for.

        Built-ins are never the answer's, unless the row says that the answer's function is called so. Nor is a module of the
        library, by `module.name` or by the answer's import: else an answer could bring a `math.isclose` of its own.
        """
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        modules = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
        found: dict[str, object] = {name: importlib.import_module(name) for name in modules & _LIBRARY & self._names.keys()}
        for name in (used & self._names.keys()) - found.keys():
            if name == entry_point or not (hasattr(builtins, name) or name.startswith("__")):
                found[name] = self._name(name)
        return found

    def ask(self, do: str, reference: Message, arguments: tuple[object, ...] = (), named: Mapping[str, object] | None = None) -> Value:
        """Have something done with an object of the answer.

        Raises: the built-in exception that the answer raised. EOFError: its process ended.
        """
        request = {
            "do": do,
            "on": reference,
            "args": [encode(each, self._refer) for each in arguments],
            "kwargs": {name: encode(each, self._refer) for name, each in (named or {}).items()},
        }
        reply = self._exchange(request)
        while "call_back" in reply:
            reply = self._exchange(self._call_back(reply))
        if "raised" in reply:
            raise _exception(reply["raised"])(reply["text"])
        for at, value in reply["changed"]:
            _change(arguments[at], decode(value, self._find))
        return decode(reply["value"], self._find)

    def _name(self, name: str) -> object:
        origin = self._names[name]
        # Only under its own name: `from sys import exit as f` must not give the tests an exit to call.
        if (module := origin.get("module")) in _LIBRARY and origin.get("name", name) == name:
            imported = importlib.import_module(module)
            return getattr(imported, name) if "name" in origin else imported
        return RemoteObject(self, {"name": name}) if origin.get("callable") else self.ask("value", {"name": name})

    def _exchange(self, request: Message) -> Message:
        try:
            send(self._requests, request)
            return receive(self._replies, self._max_reply_bytes)
        except (OSError, EOFError, TooLongError, ValueError, RecursionError):
            # What follows in the pipe, if anything, answers no question.
            self.is_broken = True
            raise

    def _call_back(self, message: Message) -> Message:
        try:
            function = self._callbacks[message["call_back"]]
            value = function(*(decode(each, self._find) for each in message["args"]))
            return {"returned": encode(value, self._refer)}
        except Exception as error:  # noqa: BLE001 - a function of the test fails in the answer's call, as it would in one process
            return {"raised": f"{type(error).__name__}: {error}"}

    def _refer(self, value: object) -> Message:
        if isinstance(value, RemoteObject):
            return object.__getattribute__(value, "_reference")  # type: ignore[no-any-return]
        if not callable(value):
            raise TypeError(f"a test gives the answer a {type(value).__name__}; only plain values and functions can be given")
        self._callbacks.append(value)
        return {"callback": len(self._callbacks) - 1}

    def _find(self, reference: Message) -> object:
        if set(reference) != {"handle"} or type(reference["handle"]) is not int:
            raise ValueError("the answer's reply refers to nothing")
        return RemoteObject(self, reference)


class RemoteObject:
    """An object of the answer. It equals nothing but what the answer itself made: no `__eq__` of the answer meets an expected value."""

    __slots__ = ("_reference", "_remote")

    def __init__(self, remote: Remote, reference: Message) -> None:
        """Args: remote: whom to ask. reference: of the object."""
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *arguments: object, **named: object) -> Value:
        return _ask(self, "call", *arguments, named=named)

    def __getattr__(self, name: str) -> Value:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: object) -> Value:
        return _ask(self, "item", key)

    def __setitem__(self, key: object, value: object) -> None:
        _ask(self, "set_item", key, value)

    def __len__(self) -> int:
        return _plain(_ask(self, "size"), int)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return _plain(_ask(self, "text"), str)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return _plain(_ask(self, "repr"), str)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Value]:
        iterator: RemoteObject = _plain(_ask(self, "iterate"), RemoteObject)
        while True:
            try:
                value = next(iterator)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Value:
        return _ask(self, "next")

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, RemoteObject) and _ask(self, "is_instance", value) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and _ask(self, "equals", other) is True

    def __hash__(self) -> int:
        return hash(repr(object.__getattribute__(self, "_reference")))


def _ask(remote_object: RemoteObject, do: str, *arguments: object, named: Mapping[str, object] | None = None) -> Value:
    remote = object.__getattribute__(remote_object, "_remote")
    return remote.ask(do, object.__getattribute__(remote_object, "_reference"), arguments, named)


def _plain(value: object, kind: type) -> Value:
    if type(value) is not kind:
        raise TypeError(f"the answer gave a {type(value).__name__} for a {kind.__name__}")
    return value


def _change(argument: Value, value: Value) -> None:
    """Make the test's argument what the answer made of it, in place, as a call within one process would have."""
    if type(argument) is not type(value):
        return
    if isinstance(argument, list):
        argument[:] = value
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(value)


def _exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError
