"""From the reports of measured pushes to the numbers of the benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_coordinator.push_report import PushReport

from shoal.weights.stages import PushStage

STAGES = (PushStage.PREPARE, PushStage.TRANSFER, PushStage.VERIFY, PushStage.COMMIT)
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One push. tokens: generated while it ran; None if nothing was generating."""

    report: PushReport
    tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second of the same load, without a push and during pushes."""

    without_push: float
    during_push: float


def summarise(idle: Sequence[Measured], busy: Sequence[Measured], rates: Rates | None) -> dict[str, Any]:
    """Medians of pushes to a server that has nothing to do, and to one that generates.

    transfer_s and the other stages are of the former where there are any; pause_s is of the latter, since only they pause anything.

    Args:
        idle, busy: not both empty.
        rates: of the load, if there was one.
    """
    first = idle or busy
    stages = _stages(first)
    sent, dense = (statistics.median(getattr(one.report, name) for one in first) for name in ("sent_bytes", "dense_bytes"))
    result: dict[str, Any] = {
        "bytes": int(dense),
        "sent_bytes": int(sent),
        "delta_share": sent / dense if dense else 1.0,
        "transfer_s": stages["transfer"],
        "transfer_min_s": min(one.report.stages_s[PushStage.TRANSFER] for one in first),
        "transfer_mb_per_s": dense / _MB / stages["transfer"],
        "pause_s": _pause_s(busy or idle),
        "push_s": statistics.median(one.report.total_s for one in first),
        "stages": stages,
        "num_idle_pushes": len(idle),
        "num_busy_pushes": len(busy),
    }
    if idle:
        result["pause_idle_s"] = _pause_s(idle)
    if busy:
        result["stages_busy"] = _stages(busy)
        result["pause_max_s"] = max(one.report.max_pause_ms for one in busy) / 1e3
        result["tokens_during_push"] = round(statistics.median(one.tokens or 0.0 for one in busy))
    else:
        result["tokens_during_push"] = 0
    if rates is not None:
        result["tokens_per_s_without_push"] = rates.without_push
        result["tokens_per_s_during_push"] = rates.during_push
    return result


def ratios(result: Mapping[str, Any], transport: str) -> dict[str, float]:
    """A push against the baselines of the same run, as far as they were measured."""
    if "memcpy_s" not in result:
        return {}
    compared = {
        "transfer_to_memcpy": result["transfer_s"] / result["memcpy_s"],
        "push_to_memcpy": result["push_s"] / result["memcpy_s"],
        "gather_broadcast_to_transfer": result["gather_broadcast_s"] / result["transfer_s"],
        "gather_broadcast_to_push": result["gather_broadcast_s"] / result["push_s"],
        "safetensors_to_push": result["safetensors_s"] / result["push_s"],
    }
    if transport == "grpc":
        compared["rate_to_grpc_stream"] = result["grpc_stream_s"] / result["transfer_s"]
    return compared


def _stages(measured: Sequence[Measured]) -> dict[str, float]:
    return {str(stage): statistics.median(one.report.stages_s[stage] for one in measured) for stage in STAGES}


def _pause_s(measured: Sequence[Measured]) -> float:
    return statistics.median(one.report.max_pause_ms for one in measured) / 1e3
