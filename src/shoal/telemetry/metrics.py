"""Prometheus metrics: the endpoint of a service and factories that keep the naming rule `shoal_<service>_<what>_<unit>`.

Label values come from closed sets (method names, stages, statuses), never from ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from shoal.errors import ConfigError

DEFAULT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_made: dict[str, object] = {}
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


def start_metrics_server(port: int, *, host: str = "127.0.0.1") -> int | None:
    """Serve `/metrics` from a daemon thread.

    Args:
        port: 0 picks a free port; -1 switches the endpoint off.
        host: Address to listen on.
    Returns: The bound port, or None if switched off.
    Raises: ConfigError: the port cannot be bound.
    """
    if port == -1:
        return None
    try:
        server, _ = start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(
            f"telemetry.metrics_port: cannot listen on {host}:{port} ({error.strerror}); choose another port, 0 for a free one, -1 for none"
        ) from error
    return int(server.server_port)


def counter(service: str, what: str | None, unit: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
    """Return the counter `shoal_<service>_<what>_<unit>_total`; a second call returns the same one."""
    return _once(metric_name(service, what, unit), lambda name: Counter(name, documentation, labels), Counter)


def gauge(service: str, what: str | None, unit: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
    """Return the gauge `shoal_<service>_<what>_<unit>`; a second call returns the same one."""
    return _once(metric_name(service, what, unit), lambda name: Gauge(name, documentation, labels), Gauge)


def histogram(
    service: str, what: str | None, unit: str, documentation: str, labels: Sequence[str] = (), buckets: Sequence[float] = DEFAULT_BUCKETS_S
) -> Histogram:
    """Return the histogram `shoal_<service>_<what>_<unit>`; a second call returns the same one."""
    return _once(metric_name(service, what, unit), lambda name: Histogram(name, documentation, labels, buckets=tuple(buckets)), Histogram)


def metric_name(service: str, what: str | None, unit: str) -> str:
    """Join the parts of a metric's name; what is None where service and unit say everything.

    Raises: ConfigError: a part is not lower-case snake case.
    """
    parts = [service, unit] if what is None else [service, what, unit]
    for part in parts:
        if not _NAME.fullmatch(part):
            raise ConfigError(f"metric name part {part!r} is not lower-case snake case; use letters, digits and _")
    return "_".join(["shoal", *parts])


def _once(name: str, make: Callable[[str], _Metric], kind: type[_Metric]) -> _Metric:
    existing = _made.get(name)
    if existing is None:
        existing = _made[name] = make(name)
    if not isinstance(existing, kind):
        raise ConfigError(f"metric {name} exists as {type(existing).__name__}; choose another name for the {kind.__name__}")
    return existing


def sample_value(name: str, labels: dict[str, str] | None = None) -> float | None:
    """Return the current value of one sample of this process, or None if it does not exist."""
    value: float | None = REGISTRY.get_sample_value(name, labels)
    return value
