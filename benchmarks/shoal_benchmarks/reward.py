"""How many samples a reward server scores, how long the coordinator's way to it takes, and what the limits of its graders cost.

    shoal bench reward [--cores 2] [--batch 256] [--repeats 5] [--seconds 2] [--json]

samples_per_s: a plain function in a reward server's graders, called over gRPC in batches by this process; beside it the same function in
a loop, and a server that scores nothing. added_latency_ms: what scoring one group through the coordinator's route takes longer than
calling the server directly; added_to_function_ms: than calling the function in this process. math_samples_per_s: the math verifier with
its limits on, beside loops without server or limits in as many processes: math-verify (ratio_math_to_math_verify), and the verifier's own
function (ratio_math_to_loop). All read the same answers, and none twice.

All processes share the same cores. Rates are medians of repeats in which all ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from shoal.cli.local.process_tree import become_subreaper
from shoal.cli.reward.own_server import own_server
from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.errors import ShoalError
from shoal.types import ScoreSample
from shoal_benchmarks.machine import PeakMemory
from shoal_benchmarks.reward_calls import caller, find_scorer, measure_calls, measure_function, measure_pass, measure_ways
from shoal_benchmarks.reward_corpus import math_items, math_samples, text_samples
from shoal_benchmarks.reward_processes import LineProcess
from shoal_benchmarks.reward_scorers import NAME, VERSION
from shoal_benchmarks.reward_summary import Measured, added_ms, latencies, median_rate, spread

MATH = "bench_math"
_PART_SAMPLES = 64
"""Samples of a call of the math verifier: eight groups of eight."""
_WARMUP_ROUNDS = 50


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="shoal bench reward", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share; fewer if the machine has fewer")
    parser.add_argument("--workers", type=int, help="graders, and processes of math-verify; default: one per core")
    parser.add_argument("--batch", type=int, default=256, help="samples per call of the function")
    parser.add_argument("--in-flight", type=int, default=4, help="calls that are open at once")
    parser.add_argument("--repeats", type=int, default=5, help="of every rate")
    parser.add_argument("--seconds", type=float, default=2.0, help="of every repeat of the function's rates")
    parser.add_argument("--group", type=int, default=8, help="samples of a group, for the latencies")
    parser.add_argument("--rounds", type=int, default=500, help="groups scored in each way, for the latencies")
    parser.add_argument("--math-samples", type=int, default=600, help="answers per repeat of the math verifier's rates")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    for name in ("cores", "workers", "batch", "in_flight", "repeats", "seconds", "group", "rounds", "math_samples"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; give a number above 0")
    return args


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the benchmark in a folder; returns the result.

    Raises: ShoalError: a process did not start, or a sample was not scored.
    """
    load_average = os.getloadavg()[0]
    cores = share_cores(args.cores)
    workers = cores if args.workers is None else args.workers
    with PeakMemory() as memory, ExitStack() as processes:
        echo = processes.enter_context(LineProcess("shoal_benchmarks.reward_echo", [], work / "echo.log"))
        bare = [processes.enter_context(bare_process(number, workers, work)) for number in range(workers)]
        _progress("starting the reward server")
        address = processes.enter_context(own_server([], service_file(work, workers)))
        result = asyncio.run(_measure(args, address, str(echo.answer()["address"]), bare))
    return {
        "benchmark": "reward",
        "cores": cores,
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "workers": workers,
        **{name: getattr(args, name) for name in ("batch", "in_flight", "repeats", "seconds", "group", "rounds", "math_samples")},
        "load_average_before": load_average,
        **result,
        "peak_memory_mib": {role: round(mib) for role, mib in sorted(memory.peak_mib.items())},
    }


def share_cores(wanted: int) -> int:
    """Keep this process, and all that it starts, on so many of the cores that it may use; returns how many these are."""
    cores = sorted(os.sched_getaffinity(0))[:wanted]
    os.sched_setaffinity(0, cores)
    return len(cores)


def cpu_model() -> str:
    """The processor's name; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def service_file(folder: Path, workers: int) -> Path:
    """Write the reward server's file: the function and the math verifier, with as many graders as workers and all limits as they are."""
    path = folder / "reward.yaml"
    tree = {"modules": ["shoal_benchmarks.reward_scorers"], "scorers": {MATH: {"kind": "math"}}, "workers": workers}
    path.write_text(yaml.safe_dump(tree))
    return path


def bare_process(number: int, workers: int, folder: Path) -> LineProcess:
    """One of the processes that run math-verify in a loop."""
    arguments = ["--worker", str(number), "--workers", str(workers)]
    return LineProcess("shoal_benchmarks.reward_bare", arguments, folder / f"bare-{number}.log")


async def _measure(args: argparse.Namespace, address: str, echo_address: str, bare: Sequence[LineProcess]) -> dict[str, Any]:
    security = SecuritySection(insecure=True)
    client, echo = RewardClient(address, security), RewardClient(echo_address, security)
    try:
        return {
            **await _measure_rates(args, client, echo),
            **await _measure_latencies(args, client),
            **await _measure_math(args, client, bare),
        }
    finally:
        await client.close()
        await echo.close()


async def _measure_rates(args: argparse.Namespace, client: RewardClient, echo: RewardClient) -> dict[str, Any]:
    samples = text_samples(args.in_flight * args.batch)
    batches = _batches(samples, args.batch)
    served, echoed = caller(client, NAME, VERSION), caller(echo, NAME, VERSION)
    for score in (served, echoed):
        await measure_calls(score, batches, args.in_flight, min(1.0, args.seconds))
    rates: dict[str, list[Measured]] = {"served": [], "echo": [], "function": []}
    for number in range(args.repeats):
        _progress(f"samples per second, {number + 1} of {args.repeats}")
        rates["served"].append(await measure_calls(served, batches, args.in_flight, args.seconds))
        rates["echo"].append(await measure_calls(echoed, batches, args.in_flight, args.seconds))
        rates["function"].append(measure_function(samples, min(1.0, args.seconds)))
    return summary_of_rates(rates)


def summary_of_rates(rates: dict[str, list[Measured]]) -> dict[str, Any]:
    """Rates of the served function, of the server that scores nothing, and of the function in a loop."""
    served, echo = median_rate(rates["served"]), median_rate(rates["echo"])
    return {
        "samples_per_s": served,
        "samples_per_s_spread": spread(rates["served"]),
        "baseline_echo_samples_per_s": echo,
        "baseline_function_samples_per_s": median_rate(rates["function"]),
        "ratio_to_echo": served / echo,
    }


async def _measure_latencies(args: argparse.Namespace, client: RewardClient) -> dict[str, Any]:
    _progress("latency of a group")
    groups = [_siblings(group) for group in _batches(text_samples(64 * args.group, seed=1), args.group)]
    scorer = await find_scorer(client, NAME)
    rounds = await measure_ways(client, scorer, groups, args.rounds, _WARMUP_ROUNDS)
    return {
        "added_latency_ms": added_ms(rounds, "route", "client"),
        "added_to_function_ms": added_ms(rounds, "route", "function"),
        "latency_ms": latencies(rounds),
    }


async def _measure_math(args: argparse.Namespace, client: RewardClient, bare: Sequence[LineProcess]) -> dict[str, Any]:
    scorer = await find_scorer(client, MATH)
    ways = ("service", "math_verify", "verifier")
    right: dict[str, float] = dict.fromkeys(ways, 0.0)
    rates: dict[str, list[Measured]] = {way: [] for way in ways}

    async def score(samples: Sequence[ScoreSample]) -> None:
        results = await caller(client, MATH, scorer.version)(samples)
        right["service"] += sum(result.value for result in results)

    await measure_pass(score, _batches(math_samples(math_items(256, seed=-2), "warm-up"), _PART_SAMPLES), args.in_flight)
    right["service"] = 0.0
    for number in range(args.repeats):
        _progress(f"math verifier, {number + 1} of {args.repeats}")
        batches = _batches(math_samples(math_items(args.math_samples, seed=number), f"math{number}"), _PART_SAMPLES)
        rates["service"].append(await measure_pass(score, batches, args.in_flight))
        for way in ways[1:]:
            measured, num_right = await asyncio.to_thread(measure_bare, bare, way, args.math_samples, number)
            rates[way].append(measured)
            right[way] += num_right
    return summary_of_math(rates, right, args.repeats * args.math_samples)


def measure_bare(processes: Sequence[LineProcess], way: str, num_items: int, seed: int) -> tuple[Measured, int]:
    """Let processes compare items in a way, from when all are ready until the last has ended; and how many were right."""
    for process in processes:
        process.ask({"way": way, "seed": seed, "num_items": num_items})
    for process in processes:
        process.answer()
    started_s = time.perf_counter()
    for process in processes:
        process.ask({"start": True})
    answers = [process.answer() for process in processes]
    measured = Measured(num_samples=sum(answer["num_items"] for answer in answers), seconds=time.perf_counter() - started_s)
    return measured, sum(answer["num_right"] for answer in answers)


def summary_of_math(rates: dict[str, list[Measured]], right: dict[str, float], num_samples: int) -> dict[str, Any]:
    """Rates of the math verifier's service and of both loops, and what share of the answers each found right."""
    service, library, loop = (median_rate(rates[way]) for way in ("service", "math_verify", "verifier"))
    return {
        "math_samples_per_s": service,
        "math_samples_per_s_spread": spread(rates["service"]),
        "baseline_math_verify_samples_per_s": library,
        "baseline_math_verify_samples_per_s_spread": spread(rates["math_verify"]),
        "baseline_math_loop_samples_per_s": loop,
        "ratio_math_to_math_verify": service / library,
        "ratio_math_to_loop": service / loop,
        "math_right_share": {way: number / num_samples for way, number in right.items()},
    }


def _batches(samples: Sequence[ScoreSample], size: int) -> list[list[ScoreSample]]:
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def _siblings(samples: Sequence[ScoreSample]) -> list[ScoreSample]:
    """The samples as answers to the first one's prompt."""
    return [replace(sample, prompt=samples[0].prompt, row=samples[0].row) for sample in samples]


def _progress(text: str) -> None:
    sys.stderr.write(f"shoal bench reward: {text}\n")
    sys.stderr.flush()


def _print(result: dict[str, Any]) -> None:
    for key, value in _flat(result):
        sys.stdout.write(f"{key:46} {value:.4g}\n" if isinstance(value, float) else f"{key:46} {value}\n")


def _flat(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m shoal_benchmarks.reward`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        work = (args.keep or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        try:
            result = measure(args, work)
        except ShoalError as error:
            sys.stderr.write(f"shoal bench reward: {error}\n")
            return 1
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
