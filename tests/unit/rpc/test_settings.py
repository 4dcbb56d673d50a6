"""Keepalive of both sides is checked against each other; limits are one constant."""

from __future__ import annotations

import re

import pytest

from shoal.errors import ConfigError
from shoal.rpc.settings import (
    CLIENT_KEEPALIVE,
    MAX_MESSAGE_BYTES,
    SERVER_KEEPALIVE,
    ClientKeepalive,
    ServerKeepalive,
    channel_options,
    check_keepalive,
    server_options,
)


def test_keepalive_defaults_fit_each_other() -> None:
    check_keepalive(CLIENT_KEEPALIVE, SERVER_KEEPALIVE)
    # grpc's own server default, one ping in 300 s, is what closes quiet connections.
    with pytest.raises(ConfigError):
        check_keepalive(CLIENT_KEEPALIVE, ServerKeepalive(min_ping_interval_ms=300_000))


@pytest.mark.parametrize(
    ("client", "server", "message"),
    [
        (ClientKeepalive(ping_interval_ms=5000), ServerKeepalive(), "every 5000 ms .* one ping in 5000 ms"),
        (ClientKeepalive(ping_interval_ms=1000), ServerKeepalive(), "every 1000 ms"),
        (ClientKeepalive(), ServerKeepalive(min_ping_interval_ms=20_000), "one ping in 20000 ms"),
        (ClientKeepalive(), ServerKeepalive(permit_without_calls=False), "pings without calls"),
    ],
)
def test_keepalive_that_would_disconnect_is_refused(client: ClientKeepalive, server: ServerKeepalive, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_keepalive(client, server)


def test_keepalive_without_idle_pings_needs_no_permission() -> None:
    check_keepalive(ClientKeepalive(ping_without_calls=False), ServerKeepalive(permit_without_calls=False))


def test_options_of_a_side_refuse_what_the_other_does_not_permit() -> None:
    with pytest.raises(ConfigError, match=re.escape("every 2000 ms")):
        channel_options(ClientKeepalive(ping_interval_ms=2000))
    with pytest.raises(ConfigError, match=re.escape("one ping in 60000 ms")):
        server_options(ServerKeepalive(min_ping_interval_ms=60_000))


def test_options_of_both_sides_have_one_message_limit() -> None:
    assert MAX_MESSAGE_BYTES == 64 * 1024 * 1024
    for options in (dict(channel_options()), dict(server_options())):
        assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
        assert options["grpc.http2.ping_timeout_ms"] == 5000


def test_server_options_refuse_to_share_a_port() -> None:
    assert dict(server_options())["grpc.so_reuseport"] == 0
