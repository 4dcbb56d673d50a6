"""The scorer of code: the Python code of a response against the unit tests of its row.

The answer is wrong, a score of 0 for the test, if it has no code, does not compile, raises, exits, crashes, hangs, or passes a limit
of time, memory, output, threads or files: everything that happens once its sandbox stands. The sample is an error, never a 0, if its
row's tests cannot be used (found before the answer runs) or a sandbox cannot be started.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ConfigError
from shoal_reward.code.answers import code_of
from shoal_reward.code.cases import cases_of
from shoal_reward.code.checks import check
from shoal_reward.code.sandbox import SandboxedProcess, SandboxError, remove_left_behind
from shoal_reward.code.settings import CodeSettings, Credit
from shoal_reward.kinds import BuiltScorer, ScorerKind

_ROLES = ("answer", "program", "tester")


def build(settings: CodeSettings) -> BuiltScorer:
    """Make a scorer of code.

    Raises: ConfigError: a library folder does not exist, or no sandbox that is strong enough can be started here.
    """
    for folder in settings.library_folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"library_folders has {folder!r}, which is no folder: give existing ones")

    def score(prompt: str, response: str, row: Mapping[str, object]) -> dict[str, float]:
        del prompt
        return score_code(response, row, settings)

    def prepare() -> None:
        remove_left_behind()
        _try_sandbox(settings)

    if settings.check_at_start:
        _try_sandbox(settings)
    return BuiltScorer(function=score, prepare=prepare, content=_digest())


def score_code(response: str, row: Mapping[str, object], settings: CodeSettings) -> dict[str, float]:
    """Run the code of a response against the tests of its row.

    Returns: `correct`, `passed_share` or both, as settings.credit says.
    Raises: DataError: the row's tests cannot be used. SandboxError: a sandbox cannot be started.
    """
    cases = cases_of(row, settings)
    source = code_of(response, settings.place)
    if source is None or len(source.encode("utf-8", "replace")) > settings.limits.source_bytes:
        return _components(0, len(cases), settings.credit)
    checked = check(source, cases, settings, is_stopped_by_failure=settings.credit is Credit.CORRECT)
    return _components(sum(checked.passed), len(cases), settings.credit)


def _components(num_passed: int, num_tests: int, credit: Credit) -> dict[str, float]:
    components = {"correct": float(num_passed == num_tests), "passed_share": num_passed / num_tests}
    chosen = {Credit.CORRECT: ("correct",), Credit.SHARE: ("passed_share",), Credit.BOTH: ("correct", "passed_share")}
    return {name: components[name] for name in chosen[credit]}


def _digest() -> str:
    """Of all files of this package: any of them can alter a score."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _try_sandbox(settings: CodeSettings) -> None:
    for role in _ROLES:
        # So that their bytecode is on disk where that can be written: sandboxes write none.
        importlib.import_module(f"shoal_reward.code.inside.{role}")
    try:
        SandboxedProcess("answer", settings, num_tests=1).close()
    except SandboxError as error:
        raise ConfigError(
            f"{error}; answers are not run without limits: see docs/code-sandbox.md, or set allow_weaker_sandbox: true where "
            "only the system call filter is missing"
        ) from error


KIND = ScorerKind(description="Python code against the unit tests of its row, in a sandbox.", settings=CodeSettings, build=build)
