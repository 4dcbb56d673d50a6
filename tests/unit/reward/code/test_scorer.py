"""The scorer of code: what is a 0, what is an error, and how it is built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shoal_reward.builtin  # noqa: F401 - registers
from shoal_reward.code import sandbox
from shoal_reward.code.sandbox import SandboxError
from shoal_reward.code.scorer import KIND, score_code
from shoal_reward.code.settings import CodePlace, CodeSettings, Credit
from shoal_reward.kinds import build_scorer

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError, DataError
from shoal.reward import REGISTRY
from tests.helpers.code_answers import PATIENT

RIGHT = "So:\n```python\ndef f(x):\n    return x + 1\n```\n"
HALF = "```python\ndef f(x):\n    return 2\n```"
ROW: dict[str, object] = {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}


def settings(credit: Credit = Credit.BOTH) -> CodeSettings:
    return CodeSettings(credit=credit, limits=PATIENT)


@pytest.mark.parametrize(
    ("response", "correct", "share"),
    [
        (RIGHT, 1.0, 1.0),
        (HALF, 0.0, 0.5),
        ("no code", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("```python\ndef f(x:\n```", 0.0, 0.0),
        ("```python\n" + "#" * 300_000 + "\ndef f(x): return x + 1\n```", 0.0, 0.0),
        ("```python\ndef f(x): return x + 1 # \ud800\n```", 0.0, 0.0),
    ],
)
def test_components(response: str, correct: float, share: float) -> None:
    assert score_code(response, ROW, settings()) == {"correct": correct, "passed_share": share}


def test_credit_chooses_the_components() -> None:
    assert score_code(HALF, ROW, settings(Credit.CORRECT)) == {"correct": 0.0}
    assert score_code(HALF, ROW, settings(Credit.SHARE)) == {"passed_share": 0.5}


@pytest.mark.parametrize("response", [RIGHT, "no code"])
def test_a_row_without_usable_tests_is_an_error_whatever_the_answer(response: str) -> None:
    with pytest.raises(DataError, match="'tests'"):
        score_code(response, {}, settings())
    with pytest.raises(DataError, match="no Python code"):
        score_code(response, {"tests": "assert f("}, settings())


def test_a_sandbox_that_does_not_start_is_an_error_and_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_BOOT", str(tmp_path / "missing.py"))
    with pytest.raises(SandboxError, match="could not be started"):
        score_code(RIGHT, ROW, settings())
    with pytest.raises(ConfigError, match="code-sandbox"):
        KIND.build(settings())


def test_a_sandbox_that_takes_too_long_to_start_is_an_error() -> None:
    hurried = settings().model_copy(update={"limits": PATIENT.model_copy(update={"start_s": 1e-9})})
    with pytest.raises(SandboxError, match="not done within"):
        score_code(RIGHT, ROW, hurried)


def test_a_service_out_of_descriptors_gives_an_error_and_no_score() -> None:
    code = (
        "import resource\nfrom shoal_reward.code.scorer import score_code\nfrom shoal_reward.code.settings import CodeSettings\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\nscore_code({RIGHT!r}, {ROW!r}, CodeSettings())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "SandboxError" in done.stderr


def test_a_definition_gives_a_scorer() -> None:
    definition = ScorerDefinition(kind="code", settings={"place": "whole", "credit": "share"})
    scorer = build_scorer("code", definition)
    assert scorer.prepare is not None
    scorer.prepare()
    assert scorer.function("", "def f(x): return x + 1", ROW) == {"passed_share": 1.0}
    assert scorer.fingerprint != build_scorer("code", ScorerDefinition(kind="code")).fingerprint


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"place": "somewhere"}, "place"),
        ({"limits": {"test_s": 10, "answer_s": 5}}, "answer_s"),
        ({"limits": {"memory_bytes": 1}}, "memory_bytes"),
        ({"library_folders": ["/no/such/folder"]}, "/no/such/folder"),
        ({"language": "c"}, "language"),
    ],
)
def test_settings_that_cannot_work_are_told(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_scorer("code", ScorerDefinition(kind="code", settings=wrong))


def test_the_package_works_where_it_is_installed(tmp_path: Path) -> None:
    """Read-only, and reached by another path."""
    package = Path(sandbox.__file__).parents[1]
    shutil.copytree(package, tmp_path / "shoal_reward", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom shoal_reward.code import scorer\n"
        f"from shoal_reward.code.settings import *\n"
        f"print(scorer.__file__, scorer.score_code({RIGHT!r}, {ROW!r}, CodeSettings()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(tmp_path / "shoal_reward/code/scorer.py"), "{'correct':", "1.0}"]


def test_default_settings_are_those_of_the_built_in_scorer() -> None:
    assert CodeSettings().place is CodePlace.FENCE
    assert REGISTRY.get("code", "1").function("", RIGHT, ROW) == {"correct": 1.0}
