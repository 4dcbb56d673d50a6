"""VERIFY on an engine worker: the staged bytes are those that were sent, and nothing is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal.errors import StateError
from shoal.types.weights import Box, CopyDigest, SinkParameter, SinkWorkerLayout
from shoal.weights import boxes
from shoal.weights.dtypes import item_bytes


def verify_staging(
    worker: SinkWorkerLayout, digests: Iterable[CopyDigest], digest_of: Callable[[SinkParameter, Box], int]
) -> Iterator[int]:
    """Check one worker's staging buffer against the digests of a push: the coverage at once, the bytes while it is iterated.

    Args:
        worker: the layout that was answered at PREPARE.
        digests: those of all workers or of this one; others are skipped.
        digest_of: xxh3-64 of the staged bytes of a box; `SinkTransport.digest`.
    Returns: the bytes of each copy as it is checked; a caller may stop in between and go on later.
    Raises: StateError: a region is not covered exactly once, or (while iterated) bytes differ; names the parameter.
    """
    own = [digest for digest in digests if digest.worker_rank == worker.worker_rank]
    check_coverage(worker, own)
    return _verify_copies(worker, own, digest_of)


def check_coverage(worker: SinkWorkerLayout, digests: Iterable[CopyDigest]) -> None:
    """Check that the digests of one worker cover every region of every parameter exactly once, and nothing else.

    A copy outside of the regions would land in padding, which must stay zero.

    Raises: StateError: names the parameter.
    """
    regions: defaultdict[str, list[Box]] = defaultdict(list)
    for region in worker.regions:
        regions[region.parameter].append(region.parameter_box)
    parts: dict[tuple[str, Box], list[Box]] = {(name, box): [] for name, region_boxes in regions.items() for box in region_boxes}
    for digest in digests:
        home = next((box for box in regions.get(digest.parameter, ()) if boxes.contains(box, digest.parameter_box)), None)
        if home is None:
            msg = f"{boxes.describe(digest.parameter_box)} of {digest.parameter} was written, but no region of worker {worker.worker_rank}"
            raise StateError(f"{msg} holds it; prepare again and plan anew")
        parts[digest.parameter, home].append(digest.parameter_box)
    for (name, box), written in parts.items():
        fault = boxes.cover_fault(box, written)
        if fault is not None:
            raise StateError(f"{name} of worker {worker.worker_rank} was not written exactly once: {fault}; push again")


def _verify_copies(
    worker: SinkWorkerLayout, digests: Sequence[CopyDigest], digest_of: Callable[[SinkParameter, Box], int]
) -> Iterator[int]:
    parameters = {parameter.name: parameter for parameter in worker.parameters}
    for digest in digests:
        parameter = parameters[digest.parameter]
        if digest_of(parameter, digest.parameter_box) != digest.xxh3:
            msg = f"staged bytes of {digest.parameter} {boxes.describe(digest.parameter_box)} on worker {worker.worker_rank} differ"
            raise StateError(f"{msg} from what the trainer wrote; push again")
        yield digest.parameter_box.num_elements * item_bytes(parameter.dtype, parameter.name)
