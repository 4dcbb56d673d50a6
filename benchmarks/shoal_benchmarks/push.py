"""How long a weight push takes, stage by stage, and for how long serving pauses, against other ways to move the same bytes.

    shoal bench push --params 300M --ranks N --tp T --transport X [--engine vllm|scripted] [--dtype bfloat16] [--change adam] [--json]

The trainer's ranks and the rollout server are processes of their own with Shoal's code in them, and the coordinator's transaction pushes;
only the training itself is left out. Pushes are made first to a server that has nothing to do (transfer_s and the other stages), then to
one that generates (pause_s, tokens_during_push, stages_busy). All times are medians; every push but the warm-up changes the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli.local.process_tree import become_subreaper
from shoal.cli.plan_shapes import shape_of_model
from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient, WeightSourceClient
from shoal.config.load import build_config, dump_config
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.weights.llama_layouts import tensors_of
from shoal.weights.stages import PushStage
from shoal_benchmarks.machine import PeakMemory
from shoal_benchmarks.models import PARAMETER_SIZES, write_model
from shoal_benchmarks.push_processes import Processes, RolloutProcess, TrainerGang
from shoal_benchmarks.push_rank import CHANGES
from shoal_benchmarks.push_summary import Measured, Rates, ratios, summarise
from shoal_benchmarks.push_traffic import Traffic, tokens_between

SERVER_ID = "rollout-0"
_MODULES = {"vllm": "shoal_rollout", "scripted": "shoal_benchmarks.push_scripted"}
_KV_CACHE_BYTES = 256 << 20
_SETTLE_SAMPLES = 24
"""Finished requests before the first push under load, so that the engine is warm."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="shoal bench push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--params", choices=list(PARAMETER_SIZES), default="300M", help="random model of this many parameters")
    model.add_argument("--model", help="Hugging Face folder instead (Llama, Mistral, Qwen2, Qwen3)")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism of the engine")
    parser.add_argument("--transport", choices=("auto", "shm", "grpc", "collective", "cuda_ipc"), default="shm")
    parser.add_argument("--engine", choices=sorted(_MODULES), default="vllm", help="scripted: a real sink without a model behind it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="serving dtype; the trainer's is float32")
    parser.add_argument("--change", choices=CHANGES, default="all", help="between pushes: all bits, a step of Adam, or nothing")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of --change adam")
    parser.add_argument("--pushes", type=int, default=5, help="measured pushes, of each kind")
    parser.add_argument("--warmup", type=int, default=2, help="pushes before them")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--no-load", action="store_true", help="no pushes while the server generates")
    parser.add_argument("--no-baselines", action="store_true", help="do not measure other ways")
    parser.add_argument("--repeats", type=int, default=5, help="of every baseline")
    parser.add_argument("--keep", type=Path, help="keep model and logs in this folder")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="any configuration override, such as push.delta=on")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    for name in ("ranks", "tp", "pushes", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is less than 1")
    return args


def configuration(args: argparse.Namespace, model: Path, work: Path) -> RunConfig:
    """The run's configuration for ranks and server."""
    from shoal.config.load import load_config

    (work / "rows.jsonl").touch()
    base = build_config(
        {
            "run": {"id": f"bench-push-{os.getpid()}", "folder": str(work / "run")},
            "model": {"path": str(model)},
            "data": {"train": str(work / "rows.jsonl"), "max_prompt_tokens": 32},
            "rollout": {
                "tensor_parallel_size": args.tp,
                "dtype": args.dtype,
                "threads": args.threads,
                "max_new_tokens": 32,
                "max_num_seqs": 16,
                "kv_cache_bytes": _KV_CACHE_BYTES,
            },
            "actor": {"ranks": args.ranks, "lr": args.lr},
            "push": {"transport": args.transport},
            "redis": {"url": "redis://127.0.0.1:1"},
            "telemetry": {"metrics_port": -1},
        }
    )
    path = work / "run.yaml"
    dump_config(base, path)
    config = load_config(path, args.set)
    dump_config(config, path)
    return config


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the benchmark in a folder; returns the result.

    Raises: ShoalError: a process did not start, or a push did not commit.
    """
    model = Path(args.model).absolute() if args.model else work / "model"
    if not args.model:
        write_model(PARAMETER_SIZES[args.params], model)
    shapes = tensors_of(shape_of_model(model))
    config = configuration(args, model, work)
    load_average = os.getloadavg()[0]
    baselines = {} if args.no_baselines else _baselines(args, shapes, work)
    with PeakMemory() as memory:
        result = asyncio.run(_measure_pushes(args, config, work))
    result |= baselines
    facts = {
        "benchmark": "push",
        "model": args.model or args.params,
        "num_parameters": sum(_size(shape) for shape in shapes.values()),
        **{name: getattr(args, name) for name in ("ranks", "tp", "transport", "engine", "dtype", "change", "threads")},
        "load_average_before": load_average,
        "peak_memory_mib": {role: round(mib) for role, mib in sorted(memory.peak_mib.items())},
    }
    return facts | result | {"ratios": ratios(result, args.transport)}


def _baselines(args: argparse.Namespace, shapes: Mapping[str, tuple[int, ...]], work: Path) -> dict[str, float]:
    from shoal_benchmarks.push_baselines import Payload, measure_baselines

    return measure_baselines(Payload(shapes=shapes, dtype=args.dtype, repeats=args.repeats, folder=str(work)), args.ranks)


async def _measure_pushes(args: argparse.Namespace, config: RunConfig, work: Path) -> dict[str, Any]:
    gang = TrainerGang(work / "run.yaml", args.ranks, args.change, work)
    server = RolloutProcess(_MODULES[args.engine], work / "run.yaml", SERVER_ID, work)
    async with Processes(gang, server):
        pushes = _Pushes(gang, server, config)
        try:
            for _ in range(args.warmup):
                await pushes.push()
            idle = [Measured(report=await pushes.push()) for _ in range(args.pushes)]
            if args.no_load or args.engine != "vllm":
                return summarise(idle, [], None)
            return summarise(idle, *(await _measure_under_load(args, pushes, server, config)))
        finally:
            await pushes.close()


class _Pushes:
    """Changes the weights and pushes them, as the coordinator does after a step."""

    def __init__(self, gang: TrainerGang, server: RolloutProcess, config: RunConfig) -> None:
        self._gang = gang
        self._source = WeightSourceClient(gang.address, config.security)
        self._sink = WeightSinkClient(server.address, config.security)
        self._settings = config.push

    async def push(self) -> Any:  # noqa: ANN401 - a PushReport, whose module is imported late
        """One push of a new version. Raises: ShoalError: it did not commit."""
        from shoal_coordinator.push import push

        version = await self._gang.update()
        report = await push(self._source, {SERVER_ID: self._sink}, version, self._settings)
        if report.state is not PushStage.COMMITTED:
            raise ShoalError(f"push of version {version} ended {report.state}: {report.error or report.failed_servers}")
        return report

    async def close(self) -> None:
        """Close the clients."""
        await self._source.close()
        await self._sink.close()


async def _measure_under_load(
    args: argparse.Namespace, pushes: _Pushes, server: RolloutProcess, config: RunConfig
) -> tuple[list[Measured], Rates]:
    client = RolloutClient(server.address, config.security)
    spans: list[tuple[float, float, Any]] = []
    try:
        async with Traffic(client).running() as traffic:
            await traffic.until(_SETTLE_SAMPLES)
            quiet_start_s = time.monotonic()
            await traffic.settle()
            quiet_end_s = time.monotonic()
            for _ in range(args.pushes):
                report = await pushes.push()
                # The change of the weights before it is not part of the push.
                end_s = time.monotonic()
                spans.append((end_s - report.total_s, end_s, report))
            await traffic.settle()
            samples = list(traffic.samples)
    finally:
        await client.close()
    busy = [Measured(report=report, tokens=tokens_between(samples, start_s, end_s)) for start_s, end_s, report in spans]
    during_s = sum(end_s - start_s for start_s, end_s, _ in spans)
    return busy, Rates(
        without_push=tokens_between(samples, quiet_start_s, quiet_end_s) / (quiet_end_s - quiet_start_s),
        during_push=sum(one.tokens or 0.0 for one in busy) / during_s,
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _print(result: Mapping[str, Any]) -> None:
    for key, value in result.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                label = f"{key}.{name}"
                sys.stdout.write(f"{label:38} {inner:.4g}\n" if isinstance(inner, float) else f"{label:38} {inner}\n")
        else:
            sys.stdout.write(f"{key:38} {value:.4g}\n" if isinstance(value, float) else f"{key:38} {value}\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m shoal_benchmarks.push`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        work = (args.keep or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        try:
            result = measure(args, work)
        except ShoalError as error:
            sys.stderr.write(f"shoal bench push: {error}\n")
            return 1
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
