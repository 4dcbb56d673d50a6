"""What the C library does with the memory of messages.

By default glibc gives the memory of a large message back to the kernel as soon as it is freed, and the next message faults in every page
anew: for a stream of 1 MiB messages that costs as much as sending them.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 16 << 20
# The most that glibc allows; it would come to it by itself once something as large has been freed.
_LARGEST_FROM_HEAP_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Keep some freed memory in this process for the messages to come; harmless to repeat. Others than glibc stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
