"""What fits into one call of a reward server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.rpc.settings import MAX_MESSAGE_BYTES
from shoal.types import ScoreSample

GROUPS_PER_CALL = 8
"""Few enough that a call's deadline (the component's timeout for each of its groups) stays bounded."""
MAX_CALL_BYTES = 3 << 20
"""Below the 4 MiB that gRPC accepts by default, which a server that is not Shoal's may have left as it is."""
MAX_SAMPLE_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
_BYTES_PER_ID = 5
_FIXED_BYTES = 64


@dataclass(slots=True)
class PlannedCall:
    """Samples that share a call, as places (group, sample within it)."""

    places: list[tuple[int, int]] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def num_groups(self) -> int:
        """Groups that the samples are of."""
        return len({group for group, _ in self.places})


class SampleSizes:
    """Sizes of samples on the wire, from above. Siblings share their prompt and row, which are measured once."""

    def __init__(self, *, with_ids: bool) -> None:
        self._with_ids = with_ids
        self._row: tuple[dict[str, object], int] | None = None
        self._prompt: tuple[str, int] | None = None

    def of(self, sample: ScoreSample) -> int:
        """Bytes of a sample."""
        if self._row is None or self._row[0] is not sample.row:
            self._row = (sample.row, _row_bytes(sample.row))
        if self._prompt is None or self._prompt[0] is not sample.prompt:
            self._prompt = (sample.prompt, _text_bytes(sample.prompt))
        ids = _BYTES_PER_ID * (len(sample.prompt_ids) + len(sample.response_ids)) if self._with_ids else 0
        return _FIXED_BYTES + len(sample.sample_id) + self._prompt[1] + self._row[1] + _text_bytes(sample.response) + ids


def plan_calls(groups: Sequence[Sequence[ScoreSample]], sizes: SampleSizes) -> list[PlannedCall]:
    """Put groups together into calls, and take apart those that are too large for one; samples stay in order."""
    return list(_planned(((place, own) for place, own in enumerate(groups)), sizes))


def _planned(groups: Iterable[tuple[int, Sequence[ScoreSample]]], sizes: SampleSizes) -> Iterator[PlannedCall]:
    call, num_groups = PlannedCall(), 0
    for group, samples in groups:
        if num_groups == GROUPS_PER_CALL:
            yield call
            call, num_groups = PlannedCall(), 0
        num_groups += bool(samples)
        for place, sample in enumerate(samples):
            num_bytes = sizes.of(sample)
            if call.places and call.num_bytes + num_bytes > MAX_CALL_BYTES:
                yield call
                call, num_groups = PlannedCall(), 1
            call.places.append((group, place))
            call.num_bytes += num_bytes
    if call.places:
        yield call


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _row_bytes(row: dict[str, object]) -> int:
    try:
        # With escapes: never less than what is sent.
        return len(json.dumps(row))
    except (TypeError, ValueError, RecursionError):
        # Whoever encodes it will say what is wrong with it.
        return 0
