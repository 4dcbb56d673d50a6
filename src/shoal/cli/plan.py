"""`shoal plan`: what a weight push would send over which link, before anything runs and without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.plan_report import PlanOptions, PlanReport, Spread, report_plan
from shoal.config.models import MAX_BUCKET_BYTES
from shoal.errors import ConfigError
from shoal.weights.dtypes import FLOATING_ITEM_BYTES

_TRANSPORTS = ("auto", "shm", "grpc", "collective", "cuda_ipc")
_COUNTS = {"num_ranks": "--ranks", "trainer_tp": "--trainer-tp", "replicas": "--replicas", "num_engines": "--engines", "tp": "--tp"}
_MAX_COUNT = 16384
_MAX_ROWS, _MAX_COLUMNS = 32, 64
_SHADES = " ░▒▓█"
_NOT_KNOWN = (
    "Derived from the model's shape, not asked of an engine: FSDP2 cuts along dim 0; vLLM fuses q, k, v and gate, up, cuts by tensor "
    "parallelism and pads the vocabulary to a multiple of 64. Not known here: quantised or MoE weights, LoRA, pipeline parallelism, what "
    "the hardware of a link carries, what deltas save."
)


def show_plan(options: PlanOptions, console: Console, *, as_json: bool) -> None:
    """Plan and print.

    Raises: ConfigError: options that do not fit together. TransportError: no plan.
    """
    _check(options)
    report = report_plan(options)
    if as_json:
        document = {"options": asdict(options), **report.as_json()}
        console.print(json.dumps(document), soft_wrap=True, markup=False, highlight=False)
        return
    console.print(_summary(options, report), highlight=False)
    console.print(_spreads(report))
    console.print(_counts(report), highlight=False)
    if options.num_ranks <= _MAX_ROWS and options.num_engines * options.tp <= _MAX_COLUMNS:
        console.print(heat_map(report.matrix, options.num_ranks, options.num_engines, options.tp))
    console.print(_NOT_KNOWN, style="dim", highlight=False)


def _check(options: PlanOptions) -> None:
    if options.dtype not in FLOATING_ITEM_BYTES:
        raise ConfigError(f"unknown --dtype {options.dtype!r}; choose one of {', '.join(FLOATING_ITEM_BYTES)}")
    if options.transport not in _TRANSPORTS:
        raise ConfigError(f"unknown --transport {options.transport!r}; choose one of {', '.join(_TRANSPORTS)}")
    if options.device not in ("cpu", "cuda"):
        raise ConfigError(f"unknown --device {options.device!r}; choose cpu or cuda")
    if options.bucket_bytes > MAX_BUCKET_BYTES:
        raise ConfigError(f"--bucket-bytes is {options.bucket_bytes}; it must be at most {MAX_BUCKET_BYTES}")
    for name, option in _COUNTS.items():
        if not 1 <= (count := getattr(options, name)) <= _MAX_COUNT:
            raise ConfigError(f"{option} is {count}; it must be 1 to {_MAX_COUNT}")


def _summary(options: PlanOptions, report: PlanReport) -> str:
    grid = f"{options.num_ranks} trainer ranks"
    parts = [f"{options.replicas} replicas" if options.replicas > 1 else "", f"TP {options.trainer_tp}" if options.trainer_tp > 1 else ""]
    inside = ", ".join(part for part in parts if part)
    engines = f"{options.num_engines} engine{'s' if options.num_engines > 1 else ''} of TP {options.tp}"
    return (
        f"{report.num_parameters:,} parameters in {options.dtype}, {grid}{f' ({inside})' if inside else ''} to {engines}: "
        f"{format_bytes(report.num_bytes)} for a dense push"
    )


def _spreads(report: PlanReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes")
    for title in ("count", "min", "median", "max"):
        table.add_column(title, justify="right")
    rows: Mapping[str, Spread] = {
        "per engine": report.engine_bytes,
        "received per worker": report.worker_bytes,
        "sent per rank": report.rank_bytes,
        "per link (rank to worker)": report.link_bytes,
        "shadow per rank (with deltas)": report.shadow_bytes,
    }
    for name, spread in rows.items():
        table.add_row(name, f"{spread.count:,}", *(format_bytes(value) for value in (spread.min, spread.median, spread.max)))
    return table


def _counts(report: PlanReport) -> str:
    links = ", ".join(f"{count:,} x {transport}" for transport, count in sorted(report.transports.items()))
    memory = "beyond its shard a rank holds one bucket per engine it sends to, and the shadow if it sends deltas"
    return (
        f"links: {links}; {report.num_buckets:,} buckets of at most {format_bytes(report.bucket_bytes)} "
        f"(largest {format_bytes(report.largest_bucket_bytes)}) from {report.num_pieces:,} pieces\n"
        f"{memory}; planned in {report.planning_cpu_s:.2f} s"
    )


def heat_map(matrix: Mapping[tuple[int, int, int], int], num_ranks: int, num_engines: int, tp: int) -> Text:
    """A row for each rank, a cell for each worker, engines side by side; the darker, the more of the largest link's bytes.

    Args:
        matrix: (rank, engine, worker) to bytes; absent is none.
    """
    largest = max(matrix.values(), default=0)
    text = Text(f"rank \\ worker, {_SHADES[1:]} up to {format_bytes(largest)} a link\n")
    for rank in range(num_ranks):
        engines = (
            "".join(_shade(matrix.get((rank, engine, worker), 0), largest) * 2 for worker in range(tp)) for engine in range(num_engines)
        )
        text.append(f"{rank:>4} |{'|'.join(engines)}|\n")
    return text


def _shade(num_bytes: int, largest: int) -> str:
    """Nothing stays blank; anything is seen."""
    return _SHADES[-(-num_bytes * (len(_SHADES) - 1) // largest)] if num_bytes else _SHADES[0]


def format_bytes(num_bytes: int) -> str:
    """Three or four digits and a decimal unit."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
