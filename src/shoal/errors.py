"""One error tree for every Shoal service.

    ShoalError
    ├── ConfigError          the run's configuration cannot work
    ├── DataError            a data file or row cannot be used
    ├── InvalidRequestError  the caller's request is wrong; never retried
    ├── StateError           valid, but not in this state or stage
    │   └── StalePolicyError the served or sampled policy version is too old
    ├── NotFoundError        the named object does not exist
    ├── CapacityError        a bound was reached (queue, shared memory)
    │   └── MessageSizeError a message is larger than the other side takes; the same one never fits
    ├── UnavailableError     not ready, draining or unreachable; idempotent calls may be retried
    ├── DeadlineError        the deadline passed
    ├── CodecError           bytes on a wire or in Redis do not match their schema
    ├── TransportError       weight bytes could not be moved
    └── InternalError        a fault of a service

Messages say what is wrong, which value, and what to do. `shoal.rpc.catalogue` maps each class to one gRPC status.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""


class ConfigError(ShoalError):
    """The run's configuration cannot work."""


class DataError(ShoalError):
    """A data file or row cannot be used."""


class InvalidRequestError(ShoalError):
    """The caller's request is wrong; it is never retried."""


class StateError(ShoalError):
    """The request is valid, but not in this state or stage."""


class StalePolicyError(StateError):
    """The served or sampled policy version is older than allowed."""


class NotFoundError(ShoalError):
    """The named object does not exist."""


class CapacityError(ShoalError):
    """A bound was reached: queue, shared memory."""


class MessageSizeError(CapacityError):
    """A message is larger than the other side takes; sending the same one again does not help."""


class UnavailableError(ShoalError):
    """The service is not ready, draining or unreachable; idempotent calls may be retried."""


class DeadlineError(ShoalError):
    """The deadline passed."""


class CodecError(ShoalError):
    """Bytes on a wire or in Redis do not match their schema."""


class TransportError(ShoalError):
    """Weight bytes could not be moved."""


class InternalError(ShoalError):
    """A fault of a service; its log has the details."""
