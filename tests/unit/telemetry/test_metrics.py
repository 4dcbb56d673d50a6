"""Metric names and the endpoint."""

from __future__ import annotations

import urllib.request

import pytest

from shoal.errors import ConfigError
from shoal.telemetry.metrics import counter, gauge, histogram, metric_name, sample_value, start_metrics_server


def test_metrics_endpoint_serves_what_was_counted() -> None:
    counter("test", "endpoint", "events", "Events.", ("kind",)).labels("a").inc(3)
    port = start_metrics_server(0)
    assert port is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'shoal_test_endpoint_events_total{kind="a"} 3.0' in answer.read().decode().splitlines()


def test_metrics_endpoint_can_be_off() -> None:
    assert start_metrics_server(-1) is None


def test_metrics_endpoint_on_a_used_port_names_it() -> None:
    port = start_metrics_server(0)
    assert port is not None
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*choose another port"):
        start_metrics_server(port)


def test_metric_made_twice_is_one() -> None:
    assert gauge("test", "twice", "bytes", "Bytes.") is gauge("test", "twice", "bytes", "Bytes.")
    gauge("test", "twice", "bytes", "Bytes.").set(5)
    assert sample_value("shoal_test_twice_bytes") == 5
    with pytest.raises(ConfigError, match="shoal_test_twice_bytes exists as Gauge"):
        histogram("test", "twice", "bytes", "Bytes.")


def test_metric_may_be_named_by_service_and_unit_alone() -> None:
    counter("test", None, "bytes", "Bytes.").inc(3)
    assert sample_value("shoal_test_bytes_total") == 3


@pytest.mark.parametrize("part", ["", "Upper", "with-dash", "1st", "a b"])
def test_metric_name_refuses_other_than_snake_case(part: str) -> None:
    with pytest.raises(ConfigError, match="snake case"):
        metric_name("coordinator", part, "seconds")
