"""What one rank answers to a command, as bytes: a result, or an error by class name and text (no pickle)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shoal import errors
from shoal.errors import InternalError, ShoalError
from shoal_trainer.distributed import PeerError

_OK, _FAILED = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error of one rank. expected: a ShoalError, after which the rank is in a known state and can go on."""

    error_class: str
    message: str
    expected: bool

    @property
    def is_of_peer(self) -> bool:
        """True if the rank only gave up since another one failed."""
        return self.error_class == PeerError.__name__


def failure_of(error: BaseException) -> Failure:
    """Describe an exception."""
    return Failure(error_class=type(error).__name__, message=str(error) or type(error).__name__, expected=isinstance(error, ShoalError))


def encode_outcome(outcome: bytes | Failure) -> bytes:
    """Convert one rank's answer."""
    if isinstance(outcome, bytes):
        return _OK + outcome
    fields = {"error_class": outcome.error_class, "message": outcome.message, "expected": outcome.expected}
    return _FAILED + json.dumps(fields).encode()


def decode_outcome(data: bytes) -> bytes | Failure:
    """Convert one rank's answer."""
    if data[:1] == _OK:
        return data[1:]
    fields = json.loads(data[1:])
    return Failure(error_class=fields["error_class"], message=fields["message"], expected=fields["expected"])


def merge_outcomes(outcomes: Sequence[bytes | Failure | None]) -> list[bytes]:
    """Return the results of all ranks, or raise the error that explains the failure.

    Args:
        outcomes: indexed by rank; None for a rank that did not answer.
    Raises: the first failing rank's own ShoalError; InternalError naming the rank for anything else.
    """
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    # A rank that merely followed another one's failure explains nothing; a fault explains more than its consequences.
    for rank, failure in sorted(failures, key=lambda item: (item[1].is_of_peer, item[1].expected, item[0])):
        raise _as_error(rank, failure, world_size=len(outcomes))
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if silent:
        raise InternalError(f"rank {silent[0]} gave no answer in time")
    return [outcome for outcome in outcomes if isinstance(outcome, bytes)]


def _as_error(rank: int, failure: Failure, world_size: int) -> ShoalError:
    cls = getattr(errors, failure.error_class, None)
    place = f"rank {rank}: " if world_size > 1 else ""
    if failure.expected and isinstance(cls, type) and issubclass(cls, ShoalError):
        return cls(f"{place}{failure.message}")
    return InternalError(f"rank {rank}: {failure.error_class}: {failure.message}")
