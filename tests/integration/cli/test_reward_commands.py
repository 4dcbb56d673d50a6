"""`shoal reward score`, `check` and `serve` with the reward process itself; nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.cli.local.process_tree import descendants
from tests.helpers.processes import wait_gone

TIMEOUT_S = 90
SCORERS = """
import pathlib
import time

from shoal.reward import reward


@reward(name="letters", version="1")
def letters(prompt, response, row):
    "Length of the response."
    return {"length": float(len(response)), "answer": float(response == row["answer"])}


@reward(name="hangs", version="1")
def hangs(prompt, response, row):
    "Says that it has begun, and never ends."
    pathlib.Path(row["mark"]).touch()
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scorers.py").write_text(SCORERS)
    rows = [{"prompt": "2+2", "response": "four", "answer": "four"}, {"response": "4", "answer": "four"}, {"response": "no answer"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "nonsense\n")
    (tmp_path / "one.jsonl").write_text(json.dumps({"response": "x", "mark": str(tmp_path / "mark")}) + "\n")
    return tmp_path


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", "reward", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_score_starts_a_service_with_the_user_s_module_and_scores(folder: Path) -> None:
    result = run(folder, "score", "letters", "--data", "rows.jsonl", "--module", "scorers.py")
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["rows.jsonl:1: scored  5  answer=1  length=4", "rows.jsonl:2: scored  1  answer=0  length=1"]
    assert lines[2].startswith("rows.jsonl:3: error: KeyError")
    assert lines[3].startswith("rows.jsonl:4: bad line: not JSON")
    assert lines[4] == "letters@1: 3 rows: 2 scored, 0 not scored, 1 error, 1 bad lines; mean 3, standard deviation 2"


def test_score_runs_scorers_of_a_file_with_settings(folder: Path) -> None:
    (folder / "service.yaml").write_text("scorers:\n  answer:\n    kind: exact\n    version: '7'\nworkers: 1\n")
    result = run(folder, "score", "answer", "--data", "rows.jsonl", "--serve", "service.yaml", "--json")
    document = json.loads(result.stdout)
    assert (document["scorer"], document["version"]) == ("answer", "7")
    assert [(row["status"], row["value"]) for row in document["rows"][:2]] == [("scored", 1.0), ("scored", 0.0)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["leters", "--module", "scorers.py"], "shoal: no scorer 'leters'; did you mean letters? there is: "),
        (["x", "--module", "missing.py"], "the reward service did not start: reward.modules: cannot load 'missing.py'"),
    ],
)
def test_score_says_in_one_line_why_it_cannot(folder: Path, arguments: list[str], words: str) -> None:
    result = run(folder, "score", *arguments, "--data", "rows.jsonl")
    assert result.returncode == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_when_score_is_ended(folder: Path, number: signal.Signals, code: int) -> None:
    with running(folder, "score", "hangs", "--data", "one.jsonl", "--module", "scorers.py") as process:
        wait_for(folder / "mark")
        children = descendants(process.pid)
        assert len(children) >= 3  # supervisor, service, grader
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == code
        assert wait_gone(children) == []


def test_serve_becomes_a_service_that_check_finds_fit(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(folder, "serve", "--module", "scorers.py", "--service-id", "reward-7", "--port", str(port)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "reward_ready" in line:
                break
        result = run(folder, "check", f"127.0.0.1:{port}", "--scorer", "letters", "--data", "rows.jsonl")
        assert result.returncode == 0, result.stdout
        assert result.stdout.splitlines()[-1].startswith("fit for use: 19 ok, 0 warnings")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
