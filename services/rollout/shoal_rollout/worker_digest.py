"""Digests of what a worker's engine computes with, piece by piece of a plan: what an audit compares with the trainer's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shoal.types import Box
from shoal.types.weights import PieceDigests
from shoal.weights.buckets import Bucket
from shoal.weights.transports.pieces import canonical_digest
from shoal.weights.transports.staging import box_view

Read = Callable[[str], tuple[Tensor, bool]]
"""Answers a parameter's values and whether they are the engine's own, not staged ones."""
DigestResult = tuple[list[PieceDigests], list[str]]


def digest_pieces(worker_rank: int, buckets: Sequence[Bucket], read: Read) -> Iterator[DigestResult | None]:
    """Digest every piece; one parameter a step, since taking a packed one apart is the dear part.

    Args:
        buckets: all buckets of this worker, of every rank.
    Returns: None after each parameter; at last the digests by rank in the plan's order, and the parameters that were read from staging.
    Raises: StateError: as `read`.
    """
    places: defaultdict[str, list[tuple[int, int, Box, str]]] = defaultdict(list)
    num_pieces: defaultdict[int, int] = defaultdict(int)
    for bucket in sorted(buckets, key=lambda bucket: (bucket.rank, bucket.index)):
        for piece in bucket.pieces:
            places[piece.parameter].append((bucket.rank, num_pieces[bucket.rank], piece.parameter_box, bucket.dtype))
            num_pieces[bucket.rank] += 1
    digests = {rank: [0] * count for rank, count in num_pieces.items()}
    staged = []
    for parameter, pieces in places.items():
        values, is_live = read(parameter)
        for rank, position, box, dtype in pieces:
            digests[rank][position] = canonical_digest(box_view(values, parameter, box), dtype)
        if not is_live:
            staged.append(parameter)
        yield None
    yield [PieceDigests(rank=rank, worker_rank=worker_rank, xxh3=tuple(xxh3)) for rank, xxh3 in sorted(digests.items())], staged
