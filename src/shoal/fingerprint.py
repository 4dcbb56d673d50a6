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
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType

MAX_FILES = 2000
_NUM_DIGITS = 16
_frozen: dict[Path, bytes] = {}


def fingerprint_of(function: Callable[..., object], settings: str = "") -> str:
    """Digest of a function's code, with the files that it imports, and of settings; of its bytecode where there is no file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    digest = hashlib.sha256()
    if entry := _file_of(code):
        root = _root_of(entry)
        for path, content in sources_of(function).items():
            digest.update(b"%s\0%d\0%s" % (path.relative_to(root).as_posix().encode(), len(content), content))
    else:
        digest.update(repr(function).encode() if code is None else _bytecode(code))
    digest.update(b"\0".join([b"", getattr(function, "__qualname__", "").encode(), settings.encode()]))
    return digest.hexdigest()[:_NUM_DIGITS]


def _bytecode(code: CodeType) -> bytes:
    """What a function without a file does; where it was written is left out."""
    constants = [_bytecode(value) if isinstance(value, CodeType) else repr(value).encode() for value in code.co_consts]
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *constants])


def sources_of(function: Callable[..., object]) -> dict[Path, bytes]:
    """The files that a function's fingerprint covers, in the order of their paths, and what is in them; none if it has no file."""
    entry = _file_of(getattr(inspect.unwrap(function), "__code__", None))
    if entry is None:
        return {}
    root = _root_of(entry)
    files = _Files(root, _package(entry, root))
    return {path: _read(path) for path in sorted(files.reached_from(entry))}


def freeze_sources(sources: Mapping[Path, bytes]) -> None:
    """Compute fingerprints from now on as if these files held this, whatever has become of them."""
    _frozen.update(sources)


def _file_of(code: CodeType | None) -> Path | None:
    if code is None:
        return None
    path = Path(os.path.normpath(Path(code.co_filename).absolute()))
    return path if _is_file(path) else None


def _root_of(entry: Path) -> Path:
    """The folder of the top-level package that a file belongs to, or of the file if it is in none."""
    root = entry.parent
    while _is_file(root / "__init__.py") and root.parent != root:
        root = root.parent
    return root


def _is_file(path: Path) -> bool:
    return path in _frozen or path.is_file()


def _read(path: Path) -> bytes:
    return _frozen[path] if path in _frozen else path.read_bytes()


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
        here = path.relative_to(self._root).parts[:-1]
        for level, name in _imports(_read(path)):
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
                if _is_file(file):
                    yield file


@lru_cache(maxsize=512)
def _imports(content: bytes) -> tuple[tuple[int, str], ...]:
    """Level and dotted name of each import in a file; `from a import b` names a.b too, which may be a module."""
    try:
        tree = ast.parse(content)
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
