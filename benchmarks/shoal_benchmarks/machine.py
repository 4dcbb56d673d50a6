"""What the machine can do, and how much memory its processes took."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from shoal.cli.local.process_tree import descendants

_ROLES = (
    "shoal_rollout",
    "shoal_reward",
    "shoal_coordinator",
    "--role actor",
    "--role critic",
    "EngineCore",
    "Worker",
    "valkey-server",
    "push_rank",
)
_MATRIX = 1024
_SAMPLE_S = 0.5


def matmul_flops_per_s(dtype: str, threads: int, seconds: float = 1.0) -> float:
    """Floating-point operations per second of large square matrix products.

    Args:
        dtype: "float32" or "bfloat16".
        threads: torch threads.
        seconds: how long to measure.
    """
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(_MATRIX, _MATRIX).to(getattr(torch, dtype))
    a @ a
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        a @ a
        count += 1
    return count * 2 * _MATRIX**3 / (time.perf_counter() - started)


def role_of(command_line: str) -> str:
    """A short name for a Shoal process; empty for others and for launchers."""
    if "torch.distributed.run" in command_line:
        return ""
    return next((role.removeprefix("--role ") for role in _ROLES if role in command_line), "")


class PeakMemory:
    """Context manager: peak resident MiB of each process below this one, by role."""

    def __init__(self) -> None:
        self.peak_mib: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            for pid in descendants(os.getpid()):
                self._note(pid)

    def _note(self, pid: int) -> None:
        try:
            command_line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        if (role := role_of(command_line)) and peak:
            self.peak_mib[role] = max(self.peak_mib.get(role, 0.0), int(peak[1]) / 1024)
