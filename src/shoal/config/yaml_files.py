"""Reads YAML files that people write; every refusal is one line that says what, which value, and what to do, without quoting secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shoal.config.explain import kind_of
from shoal.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


class StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice in one mapping; YAML would keep the last without a word."""


def _strict_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[object, object]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen and key != "<<":
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return dict(loader.construct_mapping(node, deep=True))


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def read_mapping(path: Path, *, what: str, holds: str) -> dict[str, Any]:
    """Read a file that holds a mapping.

    Args:
        what: names the kind of file in messages, such as configuration.
        holds: what must be in it, such as a mapping of sections.
    Raises: ConfigError: it cannot be read, is too large, no YAML, empty or something else.
    """
    tree = _parse(_read(path, what), f"{what} {path}")
    if tree is None:
        raise ConfigError(f"{what} {path} is empty; it needs {holds}")
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} {path} holds a {kind_of(tree)}; it must be {holds}")
    return tree


def _read(path: Path, what: str) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; a {what} has at most {MAX_FILE_BYTES}, is this the right file?")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist; check the path") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read ({error.strerror}); check that it is a file and its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not UTF-8 text (byte {error.start}); save it as UTF-8 YAML") from error


def _parse(text: str, source: str) -> object:
    try:
        parsed: object = yaml.load(text, Loader=StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; is this the right file?") from None
    return parsed


def yaml_problem(error: yaml.YAMLError) -> str:
    """Where a text is no YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    # The full text of the error would quote the line, secrets included.
    return f"{where}{problem if problem is not None else type(error).__name__}"
