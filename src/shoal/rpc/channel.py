"""Client channels: one place for limits, keepalive and transport security.

A channel belongs to the event loop and process that opened it. gRPC does not survive fork: child processes are started with
spawn or forkserver and open their own channels.
"""

from __future__ import annotations

import re

import grpc

from shoal.config.models import SecuritySection
from shoal.errors import ConfigError
from shoal.rpc.settings import channel_options
from shoal.security.tls import read_tls_files

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z._-]{1,32})?\]|[0-9A-Za-z_][0-9A-Za-z_.-]{0,252}):([0-9]{1,5})")
"""host:port. A host with other characters, such as a scheme before it, would be taken for a name and looked up again and again."""
_SHOWN_CHARS = 300


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
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"address {address[:_SHOWN_CHARS]!r} is not host:port; give for example 127.0.0.1:7000 or [::1]:7000")
    return match[1].removeprefix("[").removesuffix("]"), int(match[2])


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
