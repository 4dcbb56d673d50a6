"""Seeds of engines: reproducible, and different for every server of a run."""

from __future__ import annotations

import hashlib


def engine_seed(run_seed: int, service_id: str) -> int:
    """Derive an engine's seed; servers that started with the same one would sample the same responses.

    Returns: 31 bits, since the engine passes it to NumPy as a signed number.
    """
    digest = hashlib.sha256(f"{run_seed}/{service_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF
