"""What was checked, what came out, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.types import ScorerDescription


class CheckLevel(StrEnum):
    """How a check ended; only a failure makes a server unfit."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong, with the value, and what the author of the server can do."""

    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a server, or of one of its scorers.

    name: what was checked. scorer: name@version; empty for the server itself.
    detail: what was found, with the value. fix: what to do; empty if it is ok.
    """

    name: str
    scorer: str = ""
    level: CheckLevel
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """All checks in the order in which they were made, and the scorers that the server described."""

    checks: tuple[Check, ...]
    scorers: tuple[ScorerDescription, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.level is CheckLevel.FAILURE)


def ok(name: str, detail: str, *, scorer: str = "") -> Check:
    """A check that found nothing."""
    return Check(name=name, scorer=scorer, level=CheckLevel.OK, detail=detail)


def warning(name: str, detail: str, fix: str, *, scorer: str = "") -> Check:
    """A check that found something to know of."""
    return Check(name=name, scorer=scorer, level=CheckLevel.WARNING, detail=detail, fix=fix)


def failure(name: str, problem: Problem, *, scorer: str = "") -> Check:
    """A check that found something to repair."""
    return Check(name=name, scorer=scorer, level=CheckLevel.FAILURE, detail=problem.what, fix=problem.fix)
