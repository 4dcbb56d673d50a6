"""Channel and server settings of every Shoal connection, defined once and checked against each other.

A client that pings more often than the server permits is disconnected (ENHANCE_YOUR_CALM); gRPC's own defaults permit one ping
in 300 s on a quiet connection. Here the client pings every 10 s, also without calls, and the server permits one every 5 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ConfigError

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message in either direction; larger data goes in parts or past the control channel."""

MAX_CONCURRENT_CALLS = 4096
"""Calls that one server runs at once; more are refused with RESOURCE_EXHAUSTED."""

ChannelOptions = list[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeepalive:
    """When a client pings, and how long it waits for the answer before the connection counts as dead."""

    ping_interval_ms: int = 10_000
    ping_timeout_ms: int = 5_000
    ping_without_calls: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeepalive:
    """Which pings a server permits, and how it notices a client that is gone."""

    min_ping_interval_ms: int = 5_000
    permit_without_calls: bool = True
    ping_interval_ms: int = 10_000
    ping_timeout_ms: int = 5_000


CLIENT_KEEPALIVE = ClientKeepalive()
SERVER_KEEPALIVE = ServerKeepalive()


def check_keepalive(client: ClientKeepalive, server: ServerKeepalive) -> None:
    """Refuse settings under which the server would disconnect a quiet client.

    Raises: ConfigError: the client pings too often, or without calls although the server forbids it.
    """
    if client.ping_without_calls and not server.permit_without_calls:
        raise ConfigError("keepalive: the client pings without calls but the server does not permit it; set permit_without_calls")
    if client.ping_interval_ms <= server.min_ping_interval_ms:
        raise ConfigError(
            f"keepalive: the client pings every {client.ping_interval_ms} ms but the server permits one ping in "
            f"{server.min_ping_interval_ms} ms; raise ping_interval_ms or lower min_ping_interval_ms"
        )


def channel_options(keepalive: ClientKeepalive = CLIENT_KEEPALIVE) -> ChannelOptions:
    """Return the gRPC arguments of a client channel.

    Raises: ConfigError: the keepalive does not fit the servers'.
    """
    check_keepalive(keepalive, SERVER_KEEPALIVE)
    return [
        *_message_limits(),
        ("grpc.keepalive_time_ms", keepalive.ping_interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.ping_timeout_ms),
        # Without it a stopped peer is noticed only after the ping timeout's default of a minute.
        ("grpc.http2.ping_timeout_ms", keepalive.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(keepalive.ping_without_calls)),
        ("grpc.http2.max_pings_without_data", 0),
        # The defaults back off up to two minutes, far longer than a service takes to restart.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # shoal.rpc.retry is the only place that retries.
        ("grpc.enable_retries", 0),
        # Services talk inside one network; a proxy meant for downloads would swallow the calls.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(keepalive: ServerKeepalive = SERVER_KEEPALIVE) -> ChannelOptions:
    """Return the gRPC arguments of a server.

    Raises: ConfigError: the keepalive does not fit the clients'.
    """
    check_keepalive(CLIENT_KEEPALIVE, keepalive)
    return [
        *_message_limits(),
        ("grpc.keepalive_time_ms", keepalive.ping_interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(keepalive.permit_without_calls)),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive.min_ping_interval_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # With SO_REUSEPORT a second server on the same port would bind without an error and take half of the calls.
        ("grpc.so_reuseport", 0),
    ]


def _message_limits() -> ChannelOptions:
    return [("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
