"""What an engine worker refuses at VERIFY."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.errors import StateError
from shoal.types.weights import Box, CopyDigest, SinkParameter
from shoal.weights.planner import plan_copies
from shoal.weights.verification import verify_staging
from tests.helpers.layouts import decoder_shapes, decoder_sink, fsdp_shards, rows_of

SINK = decoder_sink("a", 2)
PLAN = plan_copies(fsdp_shards(decoder_shapes(tied=False), 3), [SINK])


def digest_of(parameter: SinkParameter, box: Box) -> int:
    return hash((parameter.name, box)) & (2**64 - 1)


PARAMETERS = {parameter.name: parameter for parameter in SINK.workers[0].parameters}
DIGESTS = [
    CopyDigest(
        worker_rank=copy.worker_rank,
        parameter=copy.parameter,
        parameter_box=copy.parameter_box,
        xxh3=digest_of(PARAMETERS[copy.parameter], copy.parameter_box),
    )
    for copy in PLAN.copies
]


def test_verify_staging_accepts_every_worker_of_a_plan_and_counts_bytes() -> None:
    assert sum(sum(verify_staging(worker, DIGESTS, digest_of)) for worker in SINK.workers) == PLAN.num_bytes


@pytest.mark.parametrize("index", [0, len(DIGESTS) // 4])
def test_verify_staging_refuses_missing_repeated_and_changed_copies(index: int) -> None:
    worker, digest = SINK.workers[0], DIGESTS[index]
    assert digest.worker_rank == 0
    for digests, words in (
        (DIGESTS[:index] + DIGESTS[index + 1 :], "missing"),
        ([*DIGESTS, digest], "overlap"),
        ([*DIGESTS[:index], replace(digest, xxh3=digest.xxh3 ^ 1), *DIGESTS[index + 1 :]], "differ"),
    ):
        with pytest.raises(StateError, match=words) as caught:
            sum(verify_staging(worker, digests, digest_of))
        assert digest.parameter in str(caught.value)


def test_verify_staging_refuses_copies_that_belong_nowhere() -> None:
    padding = CopyDigest(worker_rank=1, parameter="lm_head.weight", parameter_box=rows_of((4, 8), 3, 4), xxh3=0)
    for stray in (padding, replace(padding, parameter="nobody")):
        with pytest.raises(StateError, match="no region of worker 1 holds it"):
            # Refused before a byte is read, so nothing has to be iterated.
            verify_staging(SINK.workers[1], [*DIGESTS, stray], digest_of)
