"""`shoal demo` with bad input: one clear message, exit code 1 soon, nothing left running. No case gets as far as an engine's first step."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_benchmarks.models import write_random_model, write_sums

from shoal.cli.local.process_tree import descendants
from shoal.cli.main import main

_TIMEOUT_S = 60

BEFORE_ANY_SERVICE = [
    (["--set", "rolout.group_size=3"], "rolout is not a known key; did you mean rollout?"),
    (["--set", "run.step=3"], "run.step is not a known key; did you mean run.steps?"),
    (["--steps", "-1"], "run.steps is -1"),
    (["--set", "rollout.group_size=1", "--set", "algorithm.estimator=grpo"], "rollout.group_size is 1"),
    (["--set", "algorithm.mini_batches=7"], "algorithm.mini_batches is 7, which does not divide"),
    (["--data", "none.jsonl"], "--data none.jsonl does not exist"),
    (["--held-out", "none"], "--held-out none does not exist; give a JSONL or Parquet file, or the folder of a data set"),
    (["--redis", "redis://127.0.0.1:1"], "Redis at redis://127.0.0.1:1 cannot be reached"),
    (["--redis", "http://x"], "is not a Redis address"),
    (["--set", "push.shm_dir=/nonexistent"], "push.shm_dir '/nonexistent' is not a writable folder"),
    (["--runs", "/proc/none"], "choose a writable one with --runs"),
]

BEFORE_ANY_ENGINE = [
    (["--model", "nofolder"], "model.path 'nofolder' is no folder"),
    pytest.param(["--data", "broken.jsonl"], "broken.jsonl:2: not JSON", marks=pytest.mark.slow),
    pytest.param(["--data", "empty.jsonl"], "the file has no rows", marks=pytest.mark.slow),
    pytest.param(
        ["--data", "long.jsonl", "--set", "data.overlong=error"],
        "long.jsonl:1: the prompt has 800 tokens, more than data.max_prompt_tokens 512",
        marks=pytest.mark.slow,
    ),
    (["--set", "rollout.max_new_tokens=2048"], "the context of model"),
]
"""The coordinator finds all of these in the same place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad-input")
    write_random_model("nano", folder / "model")
    write_sums(folder / "rows.jsonl", 64)
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    (folder / "empty.jsonl").write_text("")
    (folder / "long.jsonl").write_text('{"prompt": "' + "1+" * 400 + '", "answer": "400"}\n')
    (folder / "scorer.py").write_text("import a_module_that_is_missing\n")
    return folder


def _command(*arguments: str) -> list[str]:
    own = ["--model", "model", "--data", "rows.jsonl", "--reward", "arithmetic", "--runs", "runs"]
    large = ["--set", "actor.micro_batch_tokens=65536", "--set", "critic.micro_batch_tokens=65536"]
    return [sys.executable, "-m", "shoal.cli.main", "demo", *own, *large, *arguments]


def _refusal(folder: Path, *arguments: str) -> str:
    """Run the command to its end; returns its output."""
    done = subprocess.run(_command(*arguments), cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize(("arguments", "message"), BEFORE_ANY_SERVICE)
def test_demo_refuses_before_it_starts_a_service(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", _command(*arguments)[2:])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert message in output.err
    assert "logs in" not in output.out


@pytest.mark.parametrize(("arguments", "message"), BEFORE_ANY_ENGINE)
def test_demo_refuses_model_and_data_before_it_starts_an_engine(folder: Path, arguments: list[str], message: str) -> None:
    output = _refusal(folder, *arguments)
    assert message in output
    assert "REST API" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "nope"], "reward-0 ended with code 2: no scorer 'nope'; there is: arithmetic 1"),
        pytest.param(["--set", 'reward.modules=["scorer.py"]'], "No module named 'a_module_that_is_missing'", marks=pytest.mark.slow),
    ],
)
def test_demo_says_why_a_service_refuses_to_start(folder: Path, arguments: list[str], message: str) -> None:
    output = _refusal(folder, *arguments)
    assert message in output
    assert "starting it again" not in output


@pytest.mark.parametrize("key", [pytest.param("rest_port", marks=pytest.mark.slow), "grpc_port"])
def test_demo_names_a_port_in_use(folder: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = _refusal(folder, "--set", f"coordinator.{key}={port}")
    assert "coordinator ended with code 2" in output
    assert str(port) in output


@pytest.fixture
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(_command(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_demo_interrupted_twice_leaves_nothing(started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    while "REST API" not in started.stdout.readline():
        assert started.poll() is None
    pids = descendants(started.pid)
    started.send_signal(signal.SIGINT)
    while len(descendants(started.pid)) >= len(pids):  # a person's second key press, while the services end
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=_TIMEOUT_S)
    assert started.returncode == 130, output
    assert "Traceback" not in output
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")] == []
