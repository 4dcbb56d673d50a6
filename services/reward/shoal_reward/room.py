"""A bound on what the calls hold that are under way: more is refused, so that whoever asks can go elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import CapacityError

MAX_OPEN_SAMPLES = 1 << 17
MAX_OPEN_BYTES = 1 << 30


class Room:
    """Counts samples and their bytes; used from the event loop alone."""

    def __init__(self, max_samples: int = MAX_OPEN_SAMPLES, max_bytes: int = MAX_OPEN_BYTES) -> None:
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._num_samples = 0
        self._num_bytes = 0

    @contextmanager
    def taken(self, num_samples: int, num_bytes: int) -> Iterator[None]:
        """Take room while the block runs.

        Raises: CapacityError: there is none.
        """
        if self._num_samples + num_samples > self._max_samples or self._num_bytes + num_bytes > self._max_bytes:
            raise CapacityError(
                f"{self._num_samples} samples of {self._num_bytes} bytes wait, and {num_samples} of {num_bytes} bytes more "
                f"would pass the limit of {self._max_samples} samples or {self._max_bytes} bytes: try again later, or add servers"
            )
        self._count(num_samples, num_bytes)
        try:
            yield
        finally:
            self._count(-num_samples, -num_bytes)

    def _count(self, num_samples: int, num_bytes: int) -> None:
        self._num_samples += num_samples
        self._num_bytes += num_bytes
