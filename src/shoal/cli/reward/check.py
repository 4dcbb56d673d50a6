"""`shoal reward check`: tell the author of a reward service what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.reward.components import split_scorer
from shoal.cli.reward.printing import print_json, print_line
from shoal.cli.reward.rows import BadLine, DataRow, check_data_file, read_rows
from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.conformance import Check, CheckLevel, ConformanceReport, check_service
from shoal.conformance.samples import MAX_SAMPLES
from shoal.errors import DataError
from shoal.types import ScoreSample

_LEVELS = {CheckLevel.OK: ("ok", "green"), CheckLevel.WARNING: ("warning", "yellow"), CheckLevel.FAILURE: ("FAILED", "red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What was asked for; no scorer means all."""

    address: str
    scorers: Sequence[str]
    data: Path | None
    timeout_s: float
    security: SecuritySection
    as_json: bool


def check_server(options: CheckOptions, console: Console, errors: Console) -> int:
    """Check a server and print what was found.

    Returns: exit code: 1 if a check failed.
    Raises: ConfigError: the address, a scorer or a PEM file cannot be used. DataError: the rows cannot.
    """
    wanted = [split_scorer(text) for text in options.scorers]
    samples = _samples(options.data, errors)
    report = asyncio.run(_check(options, wanted, samples))
    if options.as_json:
        print_json(console, _document(options.address, report))
    else:
        _show(options.address, report, console)
    return 0 if report.passed else 1


async def _check(options: CheckOptions, wanted: Sequence[tuple[str, str]], samples: Sequence[ScoreSample]) -> ConformanceReport:
    async with RewardClient(options.address, options.security) as client:
        return await check_service(client, wanted=wanted, samples=samples, timeout_s=options.timeout_s)


def _samples(path: Path | None, errors: Console) -> list[ScoreSample]:
    """The first rows of a file."""
    if path is None:
        return []
    check_data_file(path)
    read = list(islice(read_rows(path), MAX_SAMPLES))
    for line in read:
        if isinstance(line, BadLine):
            print_line(errors, f"{path}:{line.line}: {line.problem}")
    rows = [line.sample for line in read if isinstance(line, DataRow)]
    if not rows:
        raise DataError(f"--data {path} has no row to score in its first {MAX_SAMPLES} lines; rows have response, answer and prompt")
    return rows


def _document(address: str, report: ConformanceReport) -> dict[str, Any]:
    return {
        "address": address,
        "passed": report.passed,
        "scorers": [asdict(scorer) for scorer in report.scorers],
        "checks": [asdict(check) for check in report.checks],
    }


def _show(address: str, report: ConformanceReport, console: Console) -> None:
    width = max(len(check.name) for check in report.checks)
    owner = None
    for check in report.checks:
        if check.scorer != owner:
            owner = check.scorer
            print_line(console, owner or f"server at {address}")
        _show_check(check, width, console)
    counts = {level: sum(check.level is level for check in report.checks) for level in CheckLevel}
    passed = "fit for use" if report.passed else "not fit for use"
    print_line(console, f"{passed}: {counts[CheckLevel.OK]} ok, {counts[CheckLevel.WARNING]} warnings, {counts[CheckLevel.FAILURE]} failed")


def _show_check(check: Check, width: int, console: Console) -> None:
    word, style = _LEVELS[check.level]
    shown = None if check.level is CheckLevel.OK else style
    print_line(console, f"  {word:<7}  {check.name:<{width}}  {check.detail}", style=shown)
    if check.fix:
        print_line(console, f"  {'':<7}  {'':<{width}}  to do: {check.fix}")
