"""Files of cases that can and cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cases.document import DEFAULT_TOLERANCES, Tolerance, read_case_file
from shoal.errors import DataError

CASE = {"id": "A", "family": "rloo", "inputs": {"rewards": [1.0], "uid": ["a"]}, "expected": {"advantages": [0.0]}}


def _write(folder: Path, text: str) -> Path:
    path = folder / "cases.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON: line 1, column 2"),
        ("[]", r"holds a list; a file of cases is an object"),
        ('{"cases": []}', r"has no cases; give a list"),
        ("{}", r"has no cases"),
        ('{"cases": {"a": 1}}', r"has no cases"),
        ('{"cases": [1]}', r"cases\[0\] is a int; a case is an object"),
        ('{"cases": [{"family": "rloo"}]}', r"cases\[0\] has no id \(family 'rloo'\)"),
        ('{"cases": [{"id": 7}]}', r"cases\[0\] has no id"),
        ('{"schema": "math-cases/2", "cases": [{"id": "A"}]}', r"has schema 'math-cases/2'; this command reads math-cases/1"),
        ('{"cases": [{"id": "A"}], "default_tolerance": 1}', r"default_tolerance is 1"),
        ('{"cases": [{"id": "A"}], "default_tolerance": {"float64": {"rtol": 1}}}', r"default_tolerance\.float64 is .* give rtol and atol"),
        ('{"cases": [{"id": "A", "expected": {"x": 1, "x": 2}}]}', r"the key 'x' is given twice"),
        ("[" * 100_000, r"is nested too deeply"),
        ('{"cases": [{"id": "A"}], "default_tolerances": {}}', r"key 'default_tolerances' is unknown; known are schema, precision"),
        ('{"cases": [{"id": "A"}], "default_tolerance": {"float63": {}}}', r"default_tolerance\.float63 is unknown; known are float64"),
        (
            '{"cases": [{"id": "A"}], "default_tolerance": {"float64": {"rtol": ' + "9" * 400 + ', "atol": 0}}}',
            r"default_tolerance\.float64\.rtol is a whole number of 400 digits",
        ),
        ('{"cases": [{"id": "A", "inputs": ' + "9" * 5000 + "}]}", r"holds a number that cannot be read"),
    ],
)
def test_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_case_file(_write(tmp_path, text))


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        read_case_file(tmp_path / "nope.json")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory"):
        read_case_file(tmp_path)
    (tmp_path / "binary.json").write_bytes(b'{"\xff')
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 2\)"):
        read_case_file(tmp_path / "binary.json")


def test_tolerances_of_the_file_stand_before_the_defaults(tmp_path: Path) -> None:
    own = {"float32": {"rtol": 0.1, "atol": 0}, "bfloat16": {"rtol": 0.2, "atol": 0.3}}
    file = read_case_file(_write(tmp_path, json.dumps({"schema": "math-cases/1", "cases": [CASE], "default_tolerance": own})))
    assert file.tolerances == {
        "float64": DEFAULT_TOLERANCES["float64"],
        "float32": Tolerance(rtol=0.1, atol=0.0),
        "bfloat16": Tolerance(rtol=0.2, atol=0.3),
    }
    assert [case.case_id for case in file.cases] == ["A"]


def test_file_without_tolerances_has_the_defaults(tmp_path: Path) -> None:
    assert read_case_file(_write(tmp_path, json.dumps({"cases": [CASE]}))).tolerances == DEFAULT_TOLERANCES
