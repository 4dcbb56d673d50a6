"""vLLM's own HTTP server in a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.helpers.plain_http import PLAIN_HTTP

START_TIMEOUT_S = 240.0
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
_SMALL = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager", "--kv-cache-memory-bytes", "33554432"]


@asynccontextmanager
async def vllm_server(model: Path, log: Path, *arguments: str) -> AsyncIterator[str]:
    """Serve a model on the loopback until the block ends; gives the base address. The model's name is `tiny`.

    Args:
        model: Hugging Face folder.
        log: file for the server's output.
        arguments: more of the command line.
    """
    port = _free_port()
    process = _launch(model, log, port, arguments)
    try:
        await _until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _launch(model: Path, log: Path, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), *_SMALL, *arguments]
    with log.open("wb") as stream:
        # The engine and its workers outlive a killed server: all are ended by their group.
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | _ENVIRONMENT, start_new_session=True)


async def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(verify=PLAIN_HTTP, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.5)
    raise AssertionError(f"vLLM does not serve: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
