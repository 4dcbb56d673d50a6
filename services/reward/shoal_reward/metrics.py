"""What the reward service counts."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from enum import StrEnum

from shoal.codec.enums import score_status
from shoal.reward import Scorer
from shoal.rpc.v1 import reward_pb2
from shoal.telemetry.metrics import counter, gauge, histogram
from shoal.types import ScoreStatus


class Cause(StrEnum):
    """Why a grader's process ended."""

    TIME_LIMIT = "time_limit"
    PREPARE_LIMIT = "prepare_limit"
    STUCK = "stuck"
    DIED = "died"


_LABELS = ("scorer", "version")
_samples = counter("reward", "scored", "samples", "Samples by how their scoring ended", (*_LABELS, "status"))
_latency = histogram("reward", "sample_latency", "seconds", "Time inside the scorer per sample", _LABELS)
running_threads = gauge("reward", "running", "threads", "Threads inside a scorer, those past their deadline included")
running_workers = gauge("reward", "running", "workers", "Grader processes that are ready or at work")
killed_workers = counter("reward", "killed", "workers", "Grader processes that were killed or died, by cause", ("cause",))
queued_tasks = gauge("reward", "queued", "samples", "Samples (calls, for batch scorers) that wait for a grader")


def count(scorer: Scorer, results: Sequence[reward_pb2.ScoreResult]) -> dict[ScoreStatus, int]:
    """Count a batch; returns the number of samples by status."""
    tally = {score_status.from_proto(status): number for status, number in Tally(result.status for result in results).items()}
    for status, number in tally.items():
        _samples.labels(scorer.name, scorer.version, str(status)).inc(number)
    latency = _latency.labels(scorer.name, scorer.version)
    for result in results:
        latency.observe(result.latency_ms / 1e3)
    return tally
