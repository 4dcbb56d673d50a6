"""Addresses, as people and services write them."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal.rpc.channel import join_address, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7000", "127.0.0.1", 7000),
        ("localhost:1", "localhost", 1),
        ("reward_1.name-space.svc:65535", "reward_1.name-space.svc", 65535),
        ("[::1]:5", "::1", 5),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_split_address_takes_host_and_port_apart(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "here",
        ":0",
        ":5",
        "h:0",
        "h:65536",
        "h:+5",
        "h:5 ",
        "h:5\n",
        "h:٥",
        "::1:5",
        "[]:5",
        "[[::1]]:5",
        "http://x",
        "http://x:5",
        "unix:/run/x:5",
        "user:word@h:5",
        "a b:5",
        "a\n:5",
        "a\0:5",
        f"{'h' * 254}:5",
        f"h:{'9' * 10_000}",
    ],
)
def test_split_address_refuses_what_is_no_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port; give for example") as refused:
        split_address(address)
    assert len(str(refused.value)) < 500
