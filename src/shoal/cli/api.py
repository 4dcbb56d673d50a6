"""A small client of the coordinator's REST API."""

from __future__ import annotations

import json
import ssl
from typing import Any

import httpx

from shoal.errors import ConfigError, DeadlineError, InvalidRequestError, NotFoundError, ShoalError, StateError, UnavailableError

_TIMEOUT_S = 10.0
_NO_SUCH_PATH = "Not Found"
_ERRORS: dict[int, type[ShoalError]] = {409: StateError, 504: DeadlineError}


class CoordinatorApi:
    """Reads status and steps; asks to pause, resume or stop. Use as a context manager.

    Args:
        address: http://host:port or host:port.
    """

    def __init__(self, address: str) -> None:
        base = address if address.startswith(("http://", "https://")) else f"http://{address}"
        self.base_url = base
        # Loopback and private addresses: a proxy from the environment would only be in the way.
        try:
            self._client = httpx.Client(base_url=base, timeout=_TIMEOUT_S, trust_env=False, verify=_certificates(base))
        except httpx.InvalidURL as error:
            raise ConfigError(f"address {address!r} cannot be read ({error}); give http://HOST:PORT, as `shoal demo` prints it") from error

    def __enter__(self) -> CoordinatorApi:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def status(self) -> dict[str, Any]:
        """The run's state, step, version and what it waits for."""
        return self.get("/v1/status")

    def services(self) -> list[dict[str, Any]]:
        """Registered services."""
        found = self.get("/v1/services")
        return list(found["services"])

    def steps(self, after: int) -> list[dict[str, Any]]:
        """Metrics of the steps with a higher number than `after`."""
        found = self.get(f"/v1/steps?after={after}&limit=1000")
        return list(found["steps"])

    def command(self, name: str) -> dict[str, Any]:
        """POST pause, resume or stop."""
        return self.post(f"/v1/{name}")

    def verify_weights(self, timeout_s: float) -> dict[str, Any]:
        """Compare the servers' weights with the trainer's. Raises: StateError: nothing to compare yet. DeadlineError: not in time."""
        return self._send("POST", f"/v1/weights/verify?timeout_s={timeout_s:g}", timeout_s=timeout_s + _TIMEOUT_S)

    def get(self, path: str) -> dict[str, Any]:
        """The answer to GET. Raises ShoalError."""
        return self._send("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to POST. Raises ShoalError."""
        return self._send("POST", path, body=body)

    def _send(self, method: str, path: str, timeout_s: float = _TIMEOUT_S, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = _written(body)
        try:
            answer = self._client.request(method, path, timeout=timeout_s, content=content, headers={"content-type": "application/json"})
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnavailableError(f"no answer from the coordinator at {self.base_url}: {error}; is the run up?") from error
        if answer.status_code in _ERRORS:
            raise _ERRORS[answer.status_code](_error_text(answer))
        if answer.status_code == 422:
            raise InvalidRequestError(_error_text(answer, with_fix=True))
        if answer.status_code == 404 and (what := _error_text(answer)) != _NO_SUCH_PATH:
            raise NotFoundError(what)
        if answer.status_code >= 400:
            raise NotFoundError(f"{method} {self.base_url}{path} answered {answer.status_code}: {_error_text(answer, with_fix=True)}")
        return _body(answer, f"{self.base_url}{path}")


def _written(body: dict[str, Any] | None) -> bytes | None:
    try:
        return None if body is None else json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise InvalidRequestError(f"the request cannot be written ({error}); give finite numbers and whole characters") from None


def _certificates(base: str) -> ssl.SSLContext:
    # Reading those of the system takes longer than a call, and plain HTTP needs none.
    return ssl.create_default_context() if base.startswith("https://") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _error_text(answer: httpx.Response, *, with_fix: bool = False) -> str:
    """What a coordinator says is wrong, and what to do if that is not said in the same breath; the body of anybody else."""
    try:
        error = answer.json()["error"]
        return f"{error['what']}; {error['fix']}" if with_fix else str(error["what"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]


def _body(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise UnavailableError(f"{url} answered, but not as a coordinator; is it the REST address that `shoal demo` printed?")
    return body
