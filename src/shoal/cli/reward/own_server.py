"""A reward server of the command's own, on loopback, for as long as the command runs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.cli.local.cluster import LocalCluster
from shoal.cli.local.last_words import last_words
from shoal.cli.local.protocol import ServiceSpec
from shoal.errors import ConfigError, UnavailableError

READY_TIMEOUT_S = 300.0
"""A reward model takes long to load."""
BUILTIN = "shoal_reward.builtin"
"""What is served if nothing is asked for."""
_POLL_S = 0.02
_EXIT_REFUSED = 2


@contextmanager
def own_server(modules: Sequence[str], serve: Path | None) -> Iterator[str]:
    """Run a reward server; gives its address. It has ended when the context is left, whatever ends the command.

    Args:
        modules: modules or .py files with scorers.
        serve: YAML file of a reward service.
    Raises: ConfigError: it refuses its modules or file. UnavailableError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-reward-", ignore_cleanup_errors=True) as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "reward.log"
        spec = ServiceSpec(name="reward", argv=_argv(modules, serve, ready), env=_env(), log_path=str(log))
        with LocalCluster([folder]) as cluster:
            cluster.start(spec)
            _wait_until_ready(cluster, ready, log)
            yield json.loads(ready.read_text())["address"]


def _argv(modules: Sequence[str], serve: Path | None, ready: Path) -> list[str]:
    argv = [sys.executable, "-m", "shoal_reward", "--service-id", "offline", "--metrics-port", "-1", "--ready-file", str(ready)]
    argv += [] if serve is None else ["--serve", str(serve)]
    loaded = modules if modules or serve is not None else [BUILTIN]
    return [*argv, *(argument for module in loaded for argument in ("--module", module))]


def _env() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "TOKENIZERS_PARALLELISM": "false"}


def _wait_until_ready(cluster: LocalCluster, ready: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not ready.exists():
        for event in cluster.events():
            if event.kind == "exited":
                said = event.message or last_words(log) or f"it ended with code {event.exit_code} and said nothing"
                refused = event.exit_code == _EXIT_REFUSED
                raise (ConfigError if refused else UnavailableError)(f"the reward service did not start: {said}")
        if time.monotonic() > deadline:
            raise UnavailableError(f"the reward service was not ready after {READY_TIMEOUT_S:.0f} s: {last_words(log)}")
        time.sleep(_POLL_S)
