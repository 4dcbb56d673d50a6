"""Files of numeric cases, schema math-cases/1."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cases.inputs import DTYPES, to_number
from shoal.errors import DataError

SCHEMA = "math-cases/1"
MAX_FILE_BYTES = 64 << 20
DOCUMENT_KEYS = ("schema", "precision", "encoding", "default_tolerance", "conventions", "counts", "cases")
CASE_KEYS = ("id", "family", "title", "reports", "inputs", "expected", "tolerance", "common_wrong_values", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A found number is right within atol + rtol x |expected|."""

    rtol: float
    atol: float


DEFAULT_TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(rtol=1e-9, atol=1e-12),
    "float32": Tolerance(rtol=1e-5, atol=1e-6),
}
"""Where a file gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case as the file holds it; `fields` are all of its keys."""

    case_id: str
    fields: Mapping[str, object]

    @property
    def family(self) -> object:
        """Name of the function under test; None if the case has none."""
        return self.fields.get("family")

    @property
    def wrong_values(self) -> Mapping[str, object]:
        """What known faults give, by name."""
        values = self.fields.get("common_wrong_values")
        return values if isinstance(values, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """Cases, and the tolerance of each dtype where a case has none of its own."""

    cases: tuple[Case, ...]
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)


def read_case_file(path: str | os.PathLike[str]) -> CaseFile:
    """Read a file of cases.

    Raises: DataError: it cannot be read, is not JSON, has an unknown key, another schema, no cases, or a case without id.
    """
    document = _parsed(Path(path))
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}; a file of cases is an object with the key 'cases'")
    unknown = [key for key in document if key not in DOCUMENT_KEYS]
    if unknown:
        raise DataError(f"{path}: key {unknown[0]!r} is unknown; known are {', '.join(DOCUMENT_KEYS)}")
    schema = document.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema!r}; this command reads {SCHEMA}")
    cases = document.get("cases")
    if not isinstance(cases, list) or not cases:
        raise DataError(f"{path} has no cases; give a list of at least one under the key 'cases'")
    own = _default_tolerances(path, document.get("default_tolerance", {}))
    return CaseFile(cases=tuple(_case(path, number, case) for number, case in enumerate(cases)), tolerances={**DEFAULT_TOLERANCES, **own})


def _default_tolerances(path: str | os.PathLike[str], tolerances: object) -> dict[str, Tolerance]:
    if not isinstance(tolerances, dict):
        raise DataError(f"{path}: default_tolerance is {tolerances!r}; give an object such as {{'float64': {{'rtol': 1e-9, 'atol': 0}}}}")
    unknown = [name for name in tolerances if name not in DTYPES]
    if unknown:
        raise DataError(f"{path}: default_tolerance.{unknown[0]} is unknown; known are {', '.join(DTYPES)}")
    return {name: read_tolerance(value, f"{path}: default_tolerance.{name}") for name, value in tolerances.items()}


def read_tolerance(value: object, where: str) -> Tolerance:
    """Return a tolerance from an object with rtol and atol.

    Raises: DataError: another shape, or a negative number.
    """
    if not isinstance(value, dict) or set(value) != {"rtol", "atol"}:
        raise DataError(f"{where} is {value!r}; give rtol and atol")
    numbers = {name: to_number(number, f"{where}.{name}") for name, number in value.items()}
    if not all(0 <= number < float("inf") for number in numbers.values()):
        raise DataError(f"{where} is {value!r}; rtol and atol are numbers of at least 0")
    return Tolerance(**numbers)


def _case(path: str | os.PathLike[str], number: int, case: object) -> Case:
    if not isinstance(case, dict):
        raise DataError(f"{path}: cases[{number}] is a {type(case).__name__}; a case is an object with id, family, inputs and expected")
    case_id = case.get("id")
    if not isinstance(case_id, str) or not case_id.strip():
        raise DataError(f"{path}: cases[{number}] has no id (family {case.get('family')!r}); give it a text under 'id'")
    return Case(case_id=case_id, fields=case)


def _parsed(path: Path) -> object:
    try:
        with path.open("rb") as file:
            # Not by the size that the file system tells: a pipe or a device has none.
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise DataError(f"{path} is too large; a file of cases has at most {MAX_FILE_BYTES} bytes")
        return json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8 JSON") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise DataError(f"{path} holds a number that cannot be read ({error})") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply; a file of cases has a handful of levels") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON keeps the last of two equal keys without a word; a case would lose what it expects."""
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise DataError(f"the key {repeated[0]!r} is given twice in one object; keep one")
    return dict(pairs)
