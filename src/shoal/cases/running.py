"""Run one case: check its keys, compute what it expects, compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.cases.comparing import Difference, differences
from shoal.cases.document import CASE_KEYS, Case, CaseFile, Tolerance, read_tolerance
from shoal.cases.families import FAMILIES
from shoal.cases.family import Family
from shoal.cases.inputs import DTYPES, Inputs, check_keys
from shoal.errors import DataError, ShoalError


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What a case gave; `problems` is empty where all of it is right."""

    case_id: str
    family: str
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether everything expected was found."""
        return not self.problems


def run_cases(file: CaseFile) -> Iterator[CaseResult]:
    """Yield the result of every case, in the order of the file."""
    for case in file.cases:
        yield run_case(case, file.tolerances)


def run_case(case: Case, tolerances: Mapping[str, Tolerance]) -> CaseResult:
    """Run a case through the functions that training calls.

    Args:
        tolerances: by dtype, where the case has none of its own.
    Returns: one problem for each expected key that differs or cannot be computed; a single one where the case cannot be used.
    """
    try:
        problems = tuple(_problems(case, tolerances))
    except DataError as error:
        problems = (str(error),)
    return CaseResult(case_id=case.case_id, family=str(case.family), problems=problems)


def _problems(case: Case, tolerances: Mapping[str, Tolerance]) -> Iterator[str]:
    check_keys(case.fields, required=("id", "family"), optional=CASE_KEYS, what="case")
    family = _family(case)
    given, expected = _object(case, "inputs"), _object(case, "expected")
    family.check_inputs(given)
    dtype = given.get("dtype", "float64")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(f"inputs.dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    inputs = Inputs(values=given, dtype=DTYPES[dtype])
    tolerance = _tolerance(case, dtype, tolerances)
    problems = [problem for key, value in expected.items() for problem in _checked(case, family, inputs, tolerance, key, value)]
    if not problems:
        inputs.check_unasked()
    yield from problems


def _checked(case: Case, family: Family, inputs: Inputs, tolerance: Tolerance, key: str, value: object) -> Iterator[str]:
    path = f"expected.{key}"
    computes = family.computes(inputs)
    if key not in computes:
        yield f"expected key {key!r} is unknown; known are {', '.join(computes)}"
        return
    try:
        found = computes[key](inputs)
        wrong = list(differences(found, value, tolerance, path))
    except ShoalError as error:
        yield f"{path} cannot be checked: {error}"
        return
    except Exception as error:  # noqa: BLE001 - a function that fails on one case must not end the others
        yield f"{path} cannot be computed: {type(error).__name__}: {error}"
        return
    if wrong:
        more = f" (and {len(wrong) - 1} more under this key)" if len(wrong) > 1 else ""
        yield f"{wrong[0]}{more}{_known_fault(case, found, wrong, tolerance)}"


def _known_fault(case: Case, found: object, wrong: list[Difference], tolerance: Tolerance) -> str:
    """Name the fault that gives what was found, if the case lists it."""
    candidates = [*(difference.found for difference in wrong), *_lists(found)]
    for name, value in case.wrong_values.items():
        if any(_equals(candidate, value, tolerance) for candidate in candidates):
            return f"; this is the known fault {name}"
    return ""


def _lists(found: object) -> Iterator[list[object]]:
    """A found value and its rows, as lists."""
    plain = found.tolist() if isinstance(found, Tensor) else found
    if isinstance(plain, list):
        yield plain
        for item in plain:
            yield from _lists(item)


def _equals(found: object, wrong: object, tolerance: Tolerance) -> bool:
    try:
        return not list(differences(found, wrong, tolerance, ""))
    except DataError:
        return False


def _family(case: Case) -> Family:
    family = FAMILIES.get(case.family) if isinstance(case.family, str) else None
    if family is None:
        raise DataError(f"family {case.family!r} is unknown; known are {', '.join(FAMILIES)}")
    return family


def _object(case: Case, key: str) -> Mapping[str, object]:
    value = case.fields.get(key)
    if not isinstance(value, dict) or not value:
        raise DataError(f"{key} is {value!r}; it must be an object with at least one key")
    return value


def _tolerance(case: Case, dtype: str, tolerances: Mapping[str, Tolerance]) -> Tolerance:
    own = case.fields.get("tolerance")
    if own is not None:
        return read_tolerance(own, "tolerance")
    if dtype not in tolerances:
        raise DataError(f"there is no tolerance for {dtype}; give the case one, or the file a default_tolerance")
    return tolerances[dtype]
