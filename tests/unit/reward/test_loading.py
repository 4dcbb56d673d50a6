"""Loading modules with scorers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shoal_reward.loading import load_modules

from shoal.errors import ConfigError
from shoal.reward import REGISTRY

SCORER = """
from shoal.reward import reward

@reward(name={name!r}, version="1")
def score(prompt, response, row):
    return {value}
"""


def test_load_modules_imports_a_file_and_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_test.py").write_text("VALUE = 0.25\n")
    file = tmp_path / "scorers.py"
    file.write_text(SCORER.format(name="from_file", value="VALUE") + "\nfrom neighbour_of_test import VALUE\n")
    load_modules([str(file)])
    assert REGISTRY.get("from_file").function("", "", {}) == 0.25


def test_load_modules_keeps_files_of_the_same_name_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(SCORER.format(name=f"same_{folder}", value=1.0))
    load_modules([str(tmp_path / "a" / "mine.py"), str(tmp_path / "b" / "mine.py")])
    assert REGISTRY.get("same_a").function is not REGISTRY.get("same_b").function


def test_load_modules_imports_a_module_by_name_once() -> None:
    load_modules(["shoal_reward.builtin", "shoal_reward.builtin"])
    assert REGISTRY.get("arithmetic").version == "1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import does_not_exist_anywhere", "ModuleNotFoundError: No module named 'does_not_exist_anywhere'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        (SCORER.format(name="Bad Name", value=1.0), "scorer name 'Bad Name' is invalid"),
    ],
)
def test_load_modules_names_the_file_and_the_error(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "scorers.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_modules([str(file)])
    assert str(file) in str(error.value)
    assert reason in str(error.value)


def test_load_modules_names_a_missing_file_and_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*/missing\.py"):
        load_modules([str(tmp_path / "missing.py")])
    with pytest.raises(ConfigError, match=r"cannot load 'no_such\.module'"):
        load_modules(["no_such.module"])
