"""Where a server is, and how often and how long it is asked."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from shoal.config.base import Section

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class EndpointSection(Section):
    """A server that answers JSON over HTTP."""

    url: str
    """Base address, such as http://127.0.0.1:8000/v1 for a judge, http://127.0.0.1:8000 for a vLLM server of a reward model."""
    model: str
    """Name that the server gives the model."""
    api_key_file: str | None = None
    """File with the bearer token; read when the first request is sent."""
    insecure: bool = False
    """Whether a token may be sent over plain http to another machine."""
    ca_file: str | None = None
    """Certificates (PEM) of the authorities that an https server is checked against; None: those of the system."""
    max_open: int = Field(default=64, ge=1, le=4096)
    """Open requests at most. Scorers of one process with the same url and max_open share the limit."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time of one try, in seconds."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Time of one sample with all its tries and pauses, in seconds; waiting for its turn under max_open is not counted."""
    max_tries: int = Field(default=10, ge=1, le=100)
    """Tries at most, the first included. Failed connections, timeouts, 429 and 5xx are tried again, nothing else."""
    backoff_s: float = Field(default=0.5, gt=0)
    """Longest pause after the first try, in seconds; doubled after each; the pause is uniform between 0 and that."""
    max_backoff_s: float = Field(default=8.0, gt=0)
    """Bound of the doubling, in seconds."""
    max_response_bytes: int = Field(default=1 << 20, ge=1 << 10)
    """A longer answer of the server is an error of the sample."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("it must be http://host:port or https://host:port, a path may follow, nothing else")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it holds a user or password, which logs would show: put the token into a file and name that in api_key_file")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_token_is_safe(self) -> EndpointSection:
        parts = urlsplit(self.url)
        if self.api_key_file is not None and parts.scheme == "http" and parts.hostname not in _LOOPBACK and not self.insecure:
            raise ValueError("the token of api_key_file would travel in the clear: use https, or set insecure: true")
        return self
