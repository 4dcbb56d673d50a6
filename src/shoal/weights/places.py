"""Where the ends of a push run, and which transport connects them."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import ConfigError, TransportError
from shoal.types.weights import Place, SinkWorkerLayout

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_WANTS_SAME_HOST = frozenset({"shm", "cuda_ipc"})
_WANTS_DEVICE = {"cuda_ipc": "cuda"}


def host_id(shm_dir: str) -> str:
    """Equal for two processes that can map each other's staging files.

    The kernel's boot, and device and inode of the staging folder: two containers of one machine differ unless they share that folder.
    Raises: ConfigError: the folder cannot be looked at.
    """
    try:
        folder = os.stat(shm_dir)
    except OSError as error:
        msg = f"push.shm_dir {shm_dir}: {error.strerror}; name an existing folder of shared memory, /dev/shm on most machines"
        raise ConfigError(msg) from error
    return f"{_BOOT_ID.read_text().strip()}:{folder.st_dev}:{folder.st_ino}"


def choose_transport(setting: str, source: Place, worker: SinkWorkerLayout) -> str:
    """The transport from a trainer rank to an engine worker.

    Args:
        setting: a transport's name, or auto: GPU memory of the same host, then a collective between GPUs, then mapped memory, then gRPC.
        source: where the rank runs.
        worker: where the worker runs, and what it offers.
    Raises: TransportError: the worker does not offer it, or it does not connect the two places; says what is offered.
    """
    if setting == "auto":
        return _choose_automatically(source, worker)
    fault = _fault(setting, source, worker)
    if fault is not None:
        advice = "set push.transport to auto, or to one that is offered and reaches"
        raise TransportError(f"transport {setting} does not reach {_worker(worker)}: {fault}; {_offered(worker)}; {advice}")
    return setting


def _choose_automatically(source: Place, worker: SinkWorkerLayout) -> str:
    on_gpus = source.device == worker.place.device == "cuda"
    for transport in ("cuda_ipc", "collective", "shm", "grpc"):
        if transport == "collective" and not on_gpus:
            continue
        if _fault(transport, source, worker) is None:
            return transport
    where = f"a trainer rank on {source.device} of host {source.host_id}"
    advice = "a worker on a GPU offers shm and grpc only if push.transport says so" if worker.place.device == "cuda" else ""
    raise TransportError("; ".join(filter(None, [f"no transport connects {where} with {_worker(worker)}", _offered(worker), advice])))


def _fault(transport: str, source: Place, worker: SinkWorkerLayout) -> str | None:
    """Why a transport does not connect a rank with a worker; None if it does."""
    if transport not in worker.endpoints:
        return "it is not offered"
    if transport in _WANTS_SAME_HOST and source.host_id != worker.place.host_id:
        return f"it needs one host, but the rank is on {source.host_id}"
    device = _WANTS_DEVICE.get(transport)
    if device is not None and not source.device == worker.place.device == device:
        return f"it needs {device} on both sides, but the rank is on {source.device}"
    if transport == "collective" and source.device != worker.place.device:
        return f"it needs the same device on both sides, but the rank is on {source.device}"
    return None


def _worker(worker: SinkWorkerLayout) -> str:
    return f"worker {worker.worker_rank} on {worker.place.device} of host {worker.place.host_id}"


def _offered(worker: SinkWorkerLayout) -> str:
    return f"offered: {', '.join(sorted(worker.endpoints)) or 'nothing'}"
