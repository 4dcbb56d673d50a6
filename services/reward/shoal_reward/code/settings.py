"""Settings of the scorer of code."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from shoal.config.base import Section


class CodePlace(StrEnum):
    """Where a response has its code: the last closed ```python fence, the last <answer></answer>, or all of it."""

    FENCE = "fence"
    ANSWER = "answer"
    WHOLE = "whole"


class Credit(StrEnum):
    """What a score is made of: `correct` (1 if all tests pass, stops at the first that fails), `passed_share`, or both added up."""

    CORRECT = "correct"
    SHARE = "share"
    BOTH = "both"


class CodeLimits(Section):
    """Bounds of one sandboxed process; reaching one fails the test."""

    test_s: float = Field(default=4.0, gt=0, le=3600)
    """Wall-clock time of one test, in seconds."""
    answer_s: float = Field(default=8.0, gt=0, le=3600)
    """Wall-clock time of all tests of one answer, in seconds; what has not passed by then fails. Keep it below the service's
    sample_timeout_s, or a slow answer becomes an error instead of a 0."""
    start_s: float = Field(default=5.0, gt=0, le=600)
    """A sandbox that needs longer to start is an error of the sample, in seconds; starts count neither in test_s nor in answer_s."""
    cpu_s: int = Field(default=4, ge=1, le=3600)
    """Processor time per test, in seconds, all threads together."""
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20)
    """Address space of a process, in bytes."""
    output_bytes: int = Field(default=1 << 20, ge=1)
    """Standard output of a program, or one returned value, in bytes."""
    source_bytes: int = Field(default=256 << 10, ge=1)
    """A longer answer fails without being run, in bytes of UTF-8."""
    threads: int = Field(default=16, ge=1, le=4096)
    """Threads of a process; it can have no child processes."""
    file_bytes: int = Field(default=8 << 20, ge=0)
    """All files in the temporary folder together, in bytes; checked every 50 ms, one file can never be longer."""
    num_files: int = Field(default=64, ge=0)
    """Files in the temporary folder; checked every 50 ms."""


class CodeSettings(Section):
    """Python code against the tests of its row."""

    place: CodePlace = CodePlace.FENCE
    """Where a response has its code: fence (the last closed ```python fence), answer (<answer></answer>) or whole."""
    tests_column: str = "tests"
    """Column of the row with the tests; see docs/code-sandbox.md for the forms that they can have."""
    setup_column: str = "test_setup"
    """Column with code that runs before each test script (imports, helpers); a row need not have it."""
    entry_point_column: str = "entry_point"
    """Column with the name of the function that is tested; a row need not have it. A test script that defines check(candidate) is
    called with it."""
    credit: Credit = Credit.CORRECT
    """correct: 1 if all tests pass. share: the share of tests that pass. both: the two components added up."""
    relative_tolerance: float = Field(default=1e-9, ge=0, lt=1)
    """Fraction by which a number may differ from an expected one that is no integer; 0 asks for equality."""
    limits: CodeLimits = CodeLimits()
    """Bounds of a sandboxed process."""
    library_folders: tuple[str, ...] = ()
    """Folders with packages that answers may import; they can be read by answers. Empty: the standard library alone."""
    allow_weaker_sandbox: bool = False
    """Run answers also where the kernel takes no system call filter: they could then use the network and start processes."""
    check_at_start: bool = True
    """Try a sandbox when the scorer is built, so that a machine where none can be had is known before the first answer. The scorer
    that is there without settings leaves it to its graders: other scorers may be all that a service is for."""
    use_landlock: bool = True
    """Restrict files by Landlock where the kernel has it."""

    @model_validator(mode="after")
    def _answer_is_longer_than_test(self) -> CodeSettings:
        if self.limits.answer_s < self.limits.test_s:
            raise ValueError(f"limits.answer_s {self.limits.answer_s} is shorter than limits.test_s {self.limits.test_s}: raise answer_s")
        return self
