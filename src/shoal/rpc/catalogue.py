"""The error catalogue: every ShoalError class and its gRPC status, in both directions.

The class travels in the trailing metadata entry `shoal-error`, so a client raises exactly what the service raised. Answers
without it (gRPC's own, or a foreign service's) are mapped by status.
"""

from __future__ import annotations

import re

import grpc

from shoal import errors
from shoal.errors import ShoalError

ERROR_METADATA_KEY = "shoal-error"
# Trailing metadata is limited to a few KiB; a longer text would lose the whole status.
MAX_TEXT_CHARS = 2000

_STATUS_OF: dict[type[ShoalError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DataError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StalePolicyError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MessageSizeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CodecError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TransportError: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_CLASS_OF_NAME: dict[str, type[ShoalError]] = {ShoalError.__name__: ShoalError} | {cls.__name__: cls for cls in _STATUS_OF}
_CLASS_OF_STATUS: dict[grpc.StatusCode, type[ShoalError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StateError,
    grpc.StatusCode.ALREADY_EXISTS: errors.StateError,
    grpc.StatusCode.ABORTED: errors.StateError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    # The far side ended the call, as a server does when its grace is over; the caller's own cancellation is CancelledError.
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: errors.ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: errors.ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ConfigError,
}
_TOO_LARGE = re.compile(r"(?P<which>Sent|Received) message larger than max \((?P<size>\d+) vs\. (?P<limit>\d+)\)")


def to_status(error: ShoalError) -> tuple[grpc.StatusCode, str]:
    """Return the status and public text of an error; a subclass unknown here takes its nearest base's status."""
    text = str(error) or type(error).__name__
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}… (cut, {len(text)} characters)"
    for cls in type(error).__mro__:
        if cls in _STATUS_OF:
            return _STATUS_OF[cls], text
    return grpc.StatusCode.INTERNAL, text


def error_metadata(error: ShoalError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that carries the error's class."""
    name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASS_OF_NAME), ShoalError.__name__)
    return ((ERROR_METADATA_KEY, name),)


def from_rpc_error(error: grpc.aio.AioRpcError | grpc.Call, *, peer: str = "") -> ShoalError:
    """Return the error that a failed call stands for; the caller raises it.

    Args:
        error: What grpc.aio raised, or a synchronous call that has ended.
        peer: Named in the message when the service itself did not answer, for example "rollout at host:port".
    """
    text = error.details() or error.code().name
    name = _class_name(error)
    if name is not None:
        return _CLASS_OF_NAME[name](text)
    cls = _CLASS_OF_STATUS.get(error.code(), errors.InternalError)
    too_large = _TOO_LARGE.search(text)
    if too_large is not None:
        cls, text = errors.MessageSizeError, _too_large_text(too_large)
    elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
        text = f"the service does not offer this call ({text}); check that the address belongs to the right service and version"
    return cls(f"{peer}: {text}" if peer else text)


def _class_name(error: grpc.aio.AioRpcError | grpc.Call) -> str | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            name = value.decode() if isinstance(value, bytes) else value
            return name if name in _CLASS_OF_NAME else None
    return None


def _too_large_text(match: re.Match[str]) -> str:
    what = "the request or answer sent" if match["which"] == "Sent" else "the message received"
    return f"{what} has {match['size']} bytes, above the limit of {match['limit']} bytes; split it into smaller calls"
