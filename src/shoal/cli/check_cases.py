"""`shoal check-cases FILE.json`: numeric cases through the functions that training calls."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from shoal.cases.document import read_case_file
from shoal.cases.running import CaseResult, run_cases
from shoal.cli.one_line import one_line
from shoal.errors import DataError

_UNUSABLE = 2


def check_cases(path: Path, console: Console, errors: Console) -> int:
    """Run every case of a file, and print a line for each and a summary.

    Args:
        path: file of the schema math-cases/1.
        errors: gets the message where the file cannot be used.
    Returns: exit code: 0 if all cases are right, 1 if one is not, 2 if the file cannot be used.
    """
    try:
        file = read_case_file(path)
    except DataError as error:
        errors.print(one_line(f"shoal: {error}"), style="red", highlight=False, soft_wrap=True, markup=False)
        return _UNUSABLE
    width = max(len(case.case_id) for case in file.cases)
    num_failed = 0
    for result in run_cases(file):
        console.print(_line(result, width), highlight=False, soft_wrap=True, markup=False)
        num_failed += not result.is_ok
    num_cases = len(file.cases)
    console.print(f"{num_cases} cases: {num_cases - num_failed} ok, {num_failed} failed", highlight=False)
    return 1 if num_failed else 0


def _line(result: CaseResult, width: int) -> str:
    state = "ok" if result.is_ok else f"FAILED  {' | '.join(result.problems)}"
    return one_line(f"{result.case_id:<{width}}  {result.family:<16}  {state}")
