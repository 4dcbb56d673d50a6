"""Client channels: one place for limits, keepalive and transport security.

A channel belongs to the event loop and process that opened it. gRPC does not survive fork: child processes are started with
spawn or forkserver and open their own channels.
"""

from __future__ import annotations

import grpc

from shoal.config.models import SecuritySection
from shoal.errors import ConfigError
from shoal.rpc.settings import channel_options
from shoal.security.tls import read_tls_files


def open_channel(address: str, security: SecuritySection) -> grpc.aio.Channel:
    """Open a lazy channel; it connects on the first call and reconnects by itself.

    Args:
        address: host:port.
        security: Plaintext if insecure, else mTLS.
    Raises: ConfigError: the address is not host:port, or a PEM file cannot be read.
    """
    split_address(address)
    if security.insecure:
        return grpc.aio.insecure_channel(address, options=channel_options())
    return grpc.aio.secure_channel(address, _credentials(security), options=channel_options())


def open_thread_channel(address: str, security: SecuritySection) -> grpc.Channel:
    """Open a channel for synchronous calls from any thread, with a connection of its own: two to one address share none.

    Args, Raises: as `open_channel`.
    """
    split_address(address)
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    if security.insecure:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(security), options=options)


def _credentials(security: SecuritySection) -> grpc.ChannelCredentials:
    files = read_tls_files(security)
    return grpc.ssl_channel_credentials(root_certificates=files.ca, private_key=files.key, certificate_chain=files.cert)


def split_address(address: str) -> tuple[str, int]:
    """Split host:port; IPv6 hosts are in brackets.

    Raises: ConfigError: it is not host:port with a port in 1..65535.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"address {address!r} is not host:port; give for example 127.0.0.1:7000 or [::1]:7000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
