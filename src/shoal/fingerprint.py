"""Digests of the code behind a scorer, equal on every machine that has the same code.

A digest covers the file that a function stands in and the files that it imports, directly or by way of others, anywhere in their text:

    in a package        the other files of the same top-level package
    in a single file    files and packages beside it, in the same folder

Not covered: other packages (the interpreter and libraries), modules that are imported by a computed name, data files. The paths are taken
relative to the folder of the package or file, so that it does not matter where the code is installed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import site
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

MAX_FILES = 2000
_NUM_DIGITS = 16


def fingerprint_of(function: Callable[..., object], settings: str = "") -> str:
    """Digest of a function's code, with the files that it imports, and of settings; of its bytecode where there is no file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    path = None if code is None else Path(code.co_filename)
    digest = hashlib.sha256()
    if path is not None and path.is_file():
        for name, content in _sources(Path(os.path.normpath(path.absolute()))):
            digest.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    else:
        digest.update(repr(function).encode() if code is None else _bytecode(code))
    digest.update(b"\0".join([b"", getattr(function, "__qualname__", "").encode(), settings.encode()]))
    return digest.hexdigest()[:_NUM_DIGITS]


def _bytecode(code: CodeType) -> bytes:
    """What a function without a file does; where it was written is left out."""
    constants = [_bytecode(value) if isinstance(value, CodeType) else repr(value).encode() for value in code.co_consts]
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *constants])


def _sources(entry: Path) -> list[tuple[str, bytes]]:
    """Path and content of the files that a file consists of, in the order of their paths."""
    root = entry.parent
    while (root / "__init__.py").is_file() and root.parent != root:
        root = root.parent
    files = _Files(root, _package(entry, root))
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in sorted(files.reached_from(entry))]


def _package(entry: Path, root: Path) -> str | None:
    """The top-level package whose files count; None: all that is in the folder; empty: nothing but the file."""
    first = entry.relative_to(root).parts[0]
    if first != entry.name:
        return first
    return "" if root.resolve() in _library_folders() else None


@lru_cache(maxsize=1)
def _library_folders() -> frozenset[Path]:
    paths = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return frozenset(Path(path).resolve() for path in paths)


class _Files:
    """Which files of a folder belong together."""

    def __init__(self, root: Path, package: str | None) -> None:
        self._root = root
        self._package = package

    def reached_from(self, entry: Path) -> set[Path]:
        """The file and those that it imports."""
        module = ".".join(entry.relative_to(self._root).with_suffix("").parts)
        reached = {entry, *self._files_of(module)}
        unread = list(reached)
        while unread and len(reached) < MAX_FILES:
            path = unread.pop()
            found = {file for name in self._names(path) for file in self._files_of(name)} - reached
            reached |= found
            unread += found
        return reached

    def _names(self, path: Path) -> Iterator[str]:
        """Dotted names that a file may import, seen from the folder."""
        status = path.stat()
        here = path.relative_to(self._root).parts[:-1]
        for level, name in _imports(path, status.st_mtime_ns, status.st_size):
            base = here[: max(0, len(here) - level + 1)] if level else ()
            yield ".".join([*base, *([name] if name else [])])

    def _files_of(self, name: str) -> Iterator[Path]:
        parts = name.split(".")
        if self._package is not None and parts[0] != self._package:
            return
        # Importing a.b.c runs a and a.b first.
        for end in range(1, len(parts) + 1):
            place = self._root.joinpath(*parts[:end])
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    yield file


@lru_cache(maxsize=4096)
def _imports(path: Path, changed_ns: int, num_bytes: int) -> tuple[tuple[int, str], ...]:
    """Level and dotted name of each import in a file; `from a import b` names a.b too, which may be a module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found.update((node.level, f"{module}.{alias.name}".strip(".")) for alias in node.names if alias.name != "*")
            found.add((node.level, module))
    return tuple(sorted(found))
