"""`shoal bench NAME ...`: run a benchmark in its own process."""

from __future__ import annotations

import subprocess
import sys

from shoal.errors import ConfigError

BENCHMARKS = ("step", "push", "reward")


def run_benchmark(name: str, arguments: list[str]) -> int:
    """Run a benchmark with its own arguments; returns its exit code.

    Raises: ConfigError: there is no benchmark of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}")
    return subprocess.run([sys.executable, "-m", f"shoal_benchmarks.{name}", *arguments], check=False).returncode  # noqa: S603 - checked name
