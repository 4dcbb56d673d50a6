"""Certificates for tests of mTLS."""

from __future__ import annotations

from pathlib import Path

import trustme

from shoal.config.models import SecuritySection


def issue(folder: Path, name: str, ca: trustme.CA, trusted: trustme.CA) -> SecuritySection:
    """The settings of a service with a certificate of one authority that trusts another."""
    cert = ca.issue_cert("127.0.0.1", "localhost")
    paths = {"ca_file": folder / f"{name}-ca.pem", "cert_file": folder / f"{name}-cert.pem", "key_file": folder / f"{name}-key.pem"}
    trusted.cert_pem.write_to_path(paths["ca_file"])
    cert.cert_chain_pems[0].write_to_path(paths["cert_file"])
    cert.private_key_pem.write_to_path(paths["key_file"])
    return SecuritySection(insecure=False, **{key: str(path) for key, path in paths.items()})
