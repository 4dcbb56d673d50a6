"""Which samples go through the model together."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], *, max_tokens: int, max_samples: int) -> list[list[int]]:
    """Group samples of similar length, the longest first, so that little is padded and too large a batch shows at once.

    Args:
        lengths: tokens of each sample.
        max_tokens: samples x longest of a batch at most, unless it has one sample.
        max_samples: of a batch.
    Returns: indices of the samples of each batch; every index once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if not batches or not _fits(len(batches[-1]) + 1, lengths[batches[-1][0]], max_tokens, max_samples):
            batches.append([])
        batches[-1].append(index)
    return batches


def _fits(num_samples: int, longest: int, max_tokens: int, max_samples: int) -> bool:
    return num_samples <= max_samples and num_samples * longest <= max_tokens
