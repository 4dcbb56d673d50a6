"""`shoal check-cases`: its lines and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cli.main import app

GIVEN = Path(__file__).parents[2] / "cases" / "math-cases.json"


def run(path: Path) -> Result:
    return CliRunner().invoke(app, ["check-cases", str(path)])


@pytest.fixture
def document() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GIVEN.read_text())
    return content


def written(folder: Path, content: object) -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps(content))
    return path


def test_check_cases_passes_every_given_case(document: dict[str, Any]) -> None:
    result = run(GIVEN)
    assert result.exit_code == 0
    *lines, summary = result.stdout.splitlines()
    assert [line.split() for line in lines] == [[case["id"], case["family"], "ok"] for case in document["cases"]]
    assert summary == "28 cases: 28 ok, 0 failed"


def test_check_cases_exits_1_and_says_what_differs(tmp_path: Path, document: dict[str, Any]) -> None:
    document["cases"][0]["expected"]["returns"][0][1] = 0.5
    document["cases"][1]["family"] = "unheard-of"
    result = run(written(tmp_path, document))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("M-GAE-01  gae               FAILED  expected.returns[0][1] is 0.5, found 0.92")
    assert lines[1].startswith("M-GAE-02  unheard-of        FAILED  family 'unheard-of' is unknown")
    assert lines[2].endswith("ok")
    assert (len(lines), lines[-1]) == (29, "28 cases: 26 ok, 2 failed")


def test_check_cases_shows_every_problem_of_a_case_on_its_line(tmp_path: Path, document: dict[str, Any]) -> None:
    case = document["cases"][0]
    case["expected"] |= {"returns": [[0.0] * 4], "more[red]": 1.0}
    lines = run(written(tmp_path, document | {"cases": [case]})).stdout.splitlines()
    assert len(lines) == 2
    assert " | expected key 'more[red]' is unknown; known are advantages, returns" in lines[0]


def test_check_cases_exits_2_for_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.json", written(tmp_path, {"cases": []}), written(tmp_path, [1])):
        result = run(path)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"shoal: {path} ")


def test_check_cases_keeps_each_case_on_one_line_whatever_it_is_called(tmp_path: Path, document: dict[str, Any]) -> None:
    names = ["a\nM-GAE-01  gae  ok", "\x1b[31mred", "half \ud800", "grün"]
    path = written(tmp_path, document | {"cases": [document["cases"][0] | {"id": name} for name in names]})
    result = run(path)
    assert result.exit_code == 0
    *lines, _ = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["a\\nM-GAE-01", "\\x1b[31mred", "half \\ud800", "grün"]


def test_check_cases_never_reads_without_an_end() -> None:
    result = run(Path("/dev/zero"))
    assert result.exit_code == 2
    assert "is too large; a file of cases has at most" in result.stderr
