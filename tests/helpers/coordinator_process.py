"""A real `python -m shoal_coordinator` process on ephemeral ports, with a model folder that has a tokenizer but no weights."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from shoal_coordinator.kl_controller import KlCoefficients
from shoal_coordinator.loop_state import STATE_NAME, GangMark, StateFile, loop_state
from shoal_coordinator.prompts import PromptPosition
from shoal_coordinator.report import write_json_atomically
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shoal.config.load import build_config, dump_config
from shoal.types import ServiceKind
from tests.helpers.plain_http import PLAIN_HTTP
from tests.helpers.push_matrix_cluster import Zygote

VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789+="]
POLL_S = 0.02
START_TIMEOUT_S = 60.0


def write_model(folder: Path) -> Path:
    """A folder that is enough for the coordinator: config.json and a character tokenizer."""
    pad, bos, eos = VOCABULARY[:3]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY), "max_position_embeddings": 64, "eos_token_id": 2}))
    return folder


def write_rows(path: Path, num_rows: int) -> Path:
    """Addition problems."""
    rows = [{"prompt": f"{index}+{index}=", "answer": str(2 * index)} for index in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, redis_url: str, **sections: dict[str, Any]) -> Path:
    """A run of three steps of four groups of two samples."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"id": "test", "folder": str(folder / "run"), "steps": 3},
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"train": str(write_rows(folder / "train.jsonl", 12)), "held_out": str(write_rows(folder / "held_out.jsonl", 5))},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4},
        "reward": {"scorer": "fake"},
        "coordinator": {"lease_s": 2.0, "ready_timeout_s": 20.0},
        "redis": {"url": redis_url},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    path = folder / "config.yaml"
    dump_config(build_config(tree), path)
    return path


def write_state(folder: Path, step: int) -> None:
    """As an earlier coordinator of the run has left it beside gangs that have trained so many steps."""
    gangs = {kind: GangMark(incarnation="any", step=step) for kind in (ServiceKind.ACTOR, ServiceKind.CRITIC)}
    state = loop_state(step, gangs, PromptPosition(), KlCoefficients(kl_coef=0.0, kl_loss_coef=0.0))
    write_json_atomically(folder / "run" / STATE_NAME, StateFile(run_id="test", current=state).model_dump(mode="json"))


class ForkedProcess:
    """A child of a zygote, with what tests use of `subprocess.Popen`."""

    _asking = threading.Lock()

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        """The exit code once it has ended."""
        with self._asking:
            if self.returncode is None:
                self.returncode = self._zygote.ended().get(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutError if there is none in time."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As the kernel would."""
        self.send_signal(signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class CoordinatorProcess:
    """A started coordinator; addresses are known."""

    process: subprocess.Popen[bytes] | ForkedProcess
    grpc_address: str
    rest_address: str
    log_path: Path

    async def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object."""
        return await self._request("GET", path)

    async def text(self, path: str) -> str:
        """GET anything."""
        async with self._client() as client:
            return (await client.get(path)).raise_for_status().text

    async def post(self, path: str) -> dict[str, Any]:
        """POST without a body."""
        return await self._request("POST", path)

    async def until_state(self, *states: str, timeout_s: float = 40.0) -> dict[str, Any]:
        """Poll the status until the run is in one of the states."""
        return await self.until(lambda status: status["state"] in states, timeout_s=timeout_s)

    async def until(self, condition: Any, *, timeout_s: float = 40.0) -> dict[str, Any]:  # noqa: ANN401
        """Poll the status until it meets a condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.get("/v1/status")
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"{status}\n{self.log_path.read_text()[-3000:]}"
            await asyncio.sleep(POLL_S)

    async def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code."""
        return await asyncio.to_thread(self.process.wait, timeout_s)

    async def _request(self, method: str, path: str) -> dict[str, Any]:
        async with self._client() as client:
            answer = await client.request(method, path)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.rest_address}", trust_env=False, timeout=10.0, verify=PLAIN_HTTP)


@contextlib.asynccontextmanager
async def running_coordinator(config_path: Path, *arguments: str, forked: bool = True) -> AsyncIterator[CoordinatorProcess]:
    """Start a coordinator and wait until it serves; killed at the end if it has not ended.

    Args:
        forked: as a fork of a process that has imported everything, which saves seconds; else by its command.
    """
    folder = config_path.parent
    ready_file, log_path = folder / "coordinator.json", folder / "coordinator.log"
    argv = ["--config", str(config_path), "--ready-file", str(ready_file), *arguments]
    # That of an earlier one.
    ready_file.unlink(missing_ok=True)
    process = _fork(argv, log_path) if forked else _start(argv, log_path)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            await asyncio.sleep(POLL_S)
        ready = json.loads(ready_file.read_text())
        assert ready["pid"] == process.pid
        yield CoordinatorProcess(process=process, grpc_address=ready["grpc_address"], rest_address=ready["rest_address"], log_path=log_path)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def _start(argv: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(_without_torch(log_path.parent / "blocked"))}
    command = [sys.executable, "-m", "shoal_coordinator", *argv]
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _fork(argv: list[str], log_path: Path) -> ForkedProcess:
    zygote = _zygote()
    return ForkedProcess(zygote, zygote.start("coordinator", log_path, argv=argv))


@functools.cache
def _zygote() -> Zygote:
    """One for all tests; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-coordinators-"))
    atexit.register(shutil.rmtree, folder)
    roles = {"coordinator": "shoal_coordinator.__main__", "tokenizers": "transformers.tokenization_utils_tokenizers"}
    zygote = Zygote(folder, roles, {"PYTHONPATH": str(_without_torch(folder / "blocked"))})
    atexit.register(zygote.close)
    return zygote


def _without_torch(folder: Path) -> Path:
    """A folder that, first on the path, makes importing torch or vllm fail: the coordinator has to run without them."""
    for name in ("torch", "vllm"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text('raise ImportError("not for the coordinator")\n')
    return folder
