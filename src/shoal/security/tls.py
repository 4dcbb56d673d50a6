"""Read the PEM files of mTLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shoal.config.models import SecuritySection
from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Contents of the PEM files of one service; the key is kept out of the repr."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)


def read_tls_files(security: SecuritySection) -> TlsFiles:
    """Read the CA, certificate and key of a secure service.

    Raises: ConfigError: a file is not set, missing, unreadable or not PEM; the message names the field and the path.
    """
    return TlsFiles(
        ca=_read_pem("security.ca_file", security.ca_file),
        cert=_read_pem("security.cert_file", security.cert_file),
        key=_read_pem("security.key_file", security.key_file),
    )


def _read_pem(name: str, path: str | None) -> bytes:
    if path is None:
        raise ConfigError(f"{name} is not set; mTLS needs it: give the path of a PEM file, or set security.insecure: true for plaintext")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path} ({error.strerror}); check the path and its permissions") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{name}: {path} is not PEM (no BEGIN line); convert it to PEM")
    return content
