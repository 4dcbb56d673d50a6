"""Settings of a registered function, read from its source: the functions need torch, which a service without it cannot import."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path


@functools.cache
def keyword_settings(path: str) -> frozenset[str] | None:
    """Names of a function's keyword-only parameters, which are filled from the configuration fields of the same name.

    Args:
        path: package.module.function; the package is imported, the module is not.
    Returns: None if there is no source to read.
    """
    module, _, name = path.rpartition(".")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return frozenset(argument.arg for argument in node.args.kwonlyargs)
    return None
