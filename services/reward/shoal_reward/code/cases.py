"""The tests of a row, read and checked before anything runs: a row that cannot be used is an error of the sample, whatever the answer."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.errors import DataError
from shoal_reward.code.settings import CodeSettings

_FORMS = (
    "a script, a list of scripts (assert lines), a list of {input, output} for programs, "
    "or a list of {function, args, kwargs, output} for calls"
)

_DOES_NOTHING = (ast.Pass, ast.Import, ast.ImportFrom, ast.ClassDef)
"""Statements that no answer can fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCase:
    """A program must print the output when it reads the input."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """A function, called with plain values, must return the output."""

    function: str
    args: Sequence[object]
    kwargs: Mapping[str, object]
    output: object


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCase:
    """A script must come to its end."""

    source: str
    entry_point: str | None


Case: TypeAlias = ProgramCase | CallCase | ScriptCase


def cases_of(row: Mapping[str, object], settings: CodeSettings) -> list[Case]:
    """Read the tests of a row; all are of one kind.

    Raises: DataError: there are none, or they cannot be used.
    """
    column = settings.tests_column
    tests = _parsed(row.get(column))
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list) or not tests:
        raise DataError(f"the row's column {column!r} has no tests ({type(tests).__name__}): give {_FORMS}")
    cases = [_case(test, f"{column}[{index}]", row, settings) for index, test in enumerate(tests)]
    if len({type(case) for case in cases}) > 1:
        raise DataError(f"the row's column {column!r} mixes kinds of tests: give {_FORMS}")
    return cases


def _parsed(tests: object) -> object:
    """Tables often have lists as JSON in a text; what is no JSON list is a script."""
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        try:
            return json.loads(tests)
        except (ValueError, RecursionError):
            return tests
    return tests


def _case(test: object, where: str, row: Mapping[str, object], settings: CodeSettings) -> Case:
    if isinstance(test, str):
        return _script(test, where, row, settings)
    if not isinstance(test, dict):
        raise DataError(f"{where} is {type(test).__name__}: give {_FORMS}")
    if "function" in test:
        return _call(test, where)
    if set(test) == {"input", "output"} and isinstance(test["input"], str) and isinstance(test["output"], str):
        return ProgramCase(input=test["input"], output=test["output"])
    raise DataError(f"{where} has the fields {sorted(map(str, test))}, or an input or output that is no text: give {_FORMS}")


def _call(test: Mapping[str, object], where: str) -> CallCase:
    function, args, kwargs = test["function"], test.get("args", []), test.get("kwargs", {})
    if not isinstance(function, str) or not all(part.isidentifier() for part in function.split(".")):
        raise DataError(f"{where} has the function {function!r}: give a name, or Class.method")
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise DataError(f"{where} has args {type(args).__name__} and kwargs {type(kwargs).__name__}: give a list and an object")
    if "output" not in test or set(test) - {"function", "args", "kwargs", "output"}:
        raise DataError(f"{where} has the fields {sorted(map(str, test))}: give function, output, and args or kwargs")
    return CallCase(function=function, args=args, kwargs=kwargs, output=test["output"])


def _script(test: str, where: str, row: Mapping[str, object], settings: CodeSettings) -> ScriptCase:
    setup, entry_point = row.get(settings.setup_column), row.get(settings.entry_point_column)
    if not isinstance(setup, str | None):
        raise DataError(f"the row's column {settings.setup_column!r} is {type(setup).__name__}: give code as text")
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise DataError(f"the row's column {settings.entry_point_column!r} is {entry_point!r}: give the name of a function")
    source = f"{setup or ''}\n{test}"
    tree = _tree(source, where)
    if _tests_nothing(_tree(test, where)):
        raise DataError(f"{where} tests nothing: give a script with a statement that can fail, such as an assert")
    if _leaves_check_uncalled(tree):
        if entry_point is None:
            raise DataError(f"{where} defines check and does not call it: give the column {settings.entry_point_column!r}")
        source += f"\ncheck({entry_point})\n"
    return ScriptCase(source=source, entry_point=entry_point)


def _tree(source: str, where: str) -> ast.Module:
    try:
        tree = ast.parse(source)
        compile(tree, where, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where} is no Python code ({error}): correct the row's tests") from None
    return tree


def _tests_nothing(tree: ast.Module) -> bool:
    """Whether a script passes whatever the answer: it has nothing but texts, imports and definitions that are not called."""
    return all(
        isinstance(node, _DOES_NOTHING)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "check")
        for node in tree.body
    )


def _leaves_check_uncalled(tree: ast.Module) -> bool:
    is_defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    return is_defined and not any(isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(tree))
