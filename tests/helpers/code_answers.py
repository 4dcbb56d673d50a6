"""Runs answers of code against tests, with the real sandbox."""

from __future__ import annotations

from typing import Any

from shoal_reward.code.cases import cases_of
from shoal_reward.code.checks import Checked, check
from shoal_reward.code.settings import CodeLimits, CodeSettings

PATIENT = CodeLimits(test_s=10, answer_s=60, cpu_s=10, start_s=30)
"""Limits that a correct answer keeps also on a busy machine."""


def settings_with(*, weaker: bool = False, landlock: bool = True, folders: tuple[str, ...] = (), **limits: Any) -> CodeSettings:  # noqa: ANN401 - fields of CodeLimits
    """Settings whose limits are patient but for some."""
    chosen = PATIENT.model_copy(update=limits)
    return CodeSettings(limits=chosen, allow_weaker_sandbox=weaker, use_landlock=landlock, library_folders=folders)


def checked(answer: str, tests: object, settings: CodeSettings | None = None, **columns: object) -> Checked:
    """Run all tests; columns are further ones of the row."""
    settings = settings_with() if settings is None else settings
    return check(answer, cases_of({"tests": tests, **columns}, settings), settings, is_stopped_by_failure=False)


def passes(answer: str, tests: object, settings: CodeSettings | None = None, **columns: object) -> bool:
    """Whether an answer passes all tests."""
    return all(checked(answer, tests, settings, **columns).passed)


def prints(program: str, expected: str, settings: CodeSettings | None = None) -> bool:
    """Whether a program prints a text, and ends well."""
    return passes(program, [{"input": "", "output": expected}], settings)


def refused(attempt: str, error: str = "PermissionError", settings: CodeSettings | None = None) -> bool:
    """Whether what a program attempts (lines of code) ends with an error of a kind."""
    body = "\n    ".join(attempt.splitlines())
    program = f"try:\n    {body}\nexcept BaseException as error:\n    print(type(error).__name__)\nelse:\n    print('it worked')\n"
    return prints(program, error, settings)
