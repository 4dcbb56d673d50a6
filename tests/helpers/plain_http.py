"""For HTTP clients of tests, none of which speaks TLS."""

from __future__ import annotations

import ssl

PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""No certificates: httpx reads those of the system for every client and call otherwise, which takes longer than a pause between polls."""
