"""One run with every service on this machine: start, follow, stop, leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shoal.cli.api import CoordinatorApi
from shoal.cli.local.cluster import LocalCluster
from shoal.cli.local.embedded_redis import EmbeddedRedis, embedded_redis
from shoal.cli.local.stale import remove_stale_staging
from shoal.cli.progress import ProgressView
from shoal.cli.services import coordinator_spec, worker_specs
from shoal.config.load import dump_config
from shoal.config.models import RunConfig
from shoal.errors import ConfigError, UnavailableError

_POLL_S = 0.5
_READY_TIMEOUT_S = 30.0
_ENDED = ("finished", "stopped", "failed")


def run_locally(config: RunConfig, view: ProgressView) -> str:
    """Run until the training ends; returns finished, stopped or failed.

    Args:
        config: run.folder must not exist yet; an empty redis.url starts the embedded server.
        view: where progress goes.
    Raises: ShoalError: a service ended or never became ready; everything has been stopped by then.
    """
    folder = Path(config.run.folder)
    _check_staging_folder(config.push.shm_dir)
    _make_folder(folder)
    for name in remove_stale_staging(config.push.shm_dir):
        view.message(f"removed {config.push.shm_dir}/{name}, which a killed run had left behind")
    with tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as runtime:
        redis = None if config.redis.url else embedded_redis(Path(runtime), folder / "redis", folder / "logs" / "redis.log")
        if redis is not None:
            config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis.url})})
        dump_config(config, folder / "config.yaml")
        cleanup = [f"{config.push.shm_dir}/shoal-{config.run.id}-rollout-*", runtime]
        with LocalCluster(cleanup) as cluster, _start_services(cluster, config, redis, view) as api:
            return _follow(cluster, api, view)


def _start_services(cluster: LocalCluster, config: RunConfig, redis: EmbeddedRedis | None, view: ProgressView) -> CoordinatorApi:
    folder = Path(config.run.folder)
    logs, config_path, ready_file = folder / "logs", folder / "config.yaml", folder / "coordinator.json"
    view.message(f"run {config.run.id}; logs in {logs}")
    if redis is not None:
        cluster.start(redis.spec)
    cluster.start(coordinator_spec(config_path, ready_file, logs))
    if redis is not None:
        cluster.wait_until(redis.is_ready, "the embedded Redis server", _READY_TIMEOUT_S)
    cluster.wait_until(ready_file.exists, "the coordinator", _READY_TIMEOUT_S)
    ready = json.loads(ready_file.read_text())
    api = CoordinatorApi(ready["rest_address"])
    # Bad data or an unfit model must not cost the start of an engine.
    cluster.wait_until(
        lambda: api.status()["state"] != "starting", "the coordinator to check model and data", config.coordinator.ready_timeout_s
    )
    if api.status()["state"] == "failed":
        return api
    for spec in worker_specs(config, config_path, ready["grpc_address"], logs):
        cluster.start(spec)
    view.message(f"REST API: {api.base_url} (shoal status --address {api.base_url})")
    return api


def _follow(cluster: LocalCluster, api: CoordinatorApi, view: ProgressView) -> str:
    last = 0
    while True:
        _check_services(cluster, view)
        status, steps = api.status(), api.steps(last)
        last = max([last, *(int(step["step"]) for step in steps)])
        view.update(status, steps)
        if status["state"] in _ENDED:
            if status.get("error"):
                view.message(f"error: {status['error']}")
            return str(status["state"])
        time.sleep(_POLL_S)


def _check_services(cluster: LocalCluster, view: ProgressView) -> None:
    for event in cluster.events():
        if event.kind == "restarting":
            view.message(f"{cluster.explain(event)}; starting it again")
        elif event.kind == "exited":
            raise UnavailableError(cluster.explain(event))


def _check_staging_folder(shm_dir: str) -> None:
    if not os.path.isdir(shm_dir) or not os.access(shm_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"push.shm_dir {shm_dir!r} is not a writable folder; give a tmpfs such as /dev/shm with --set push.shm_dir=...")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except FileExistsError as error:
        raise ConfigError(f"run.folder {folder} exists already; give another with --set run.folder=..., or remove it") from error
    except OSError as error:
        raise ConfigError(f"run folder {folder} cannot be made ({error.strerror}); choose a writable one with --runs") from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that every way of ending passes through the same clean-up."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")
