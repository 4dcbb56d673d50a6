"""Seconds per PPO step through all services, against the time that the step's arithmetic needs on this machine.

    shoal bench step --size nano|micro|mini | --model DIR  --samples N --max-new-tokens T [--json]

Critic, reference (KL in the reward), one epoch, random weights, responses of exactly T tokens (--until-eos for at most T).
The baseline is the step's training FLOPs at the speed of large matrix products measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.curves import read_steps
from shoal.cli.demo import configs_folder
from shoal.cli.local_run import run_locally
from shoal.cli.progress import open_view
from shoal.config.load import load_config
from shoal.errors import ShoalError
from shoal_benchmarks.machine import PeakMemory, matmul_flops_per_s
from shoal_benchmarks.models import SIZES, write_random_model, write_sums

_STAGES = ("rollout_s", "reward_s", "queue_s", "forward_s", "advantages_s", "update_s", "push_s", "control_s")
_FLOPS_PER_PARAMETER_AND_TOKEN = {"actor": 6, "critic": 6, "reference": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Medians over the measured steps."""

    step_s: float
    stages: dict[str, float]
    tokens_per_s: float
    control_share: float
    push_pause_ms: float
    num_steps: int


def summarise(steps: list[dict[str, Any]], warmup: int) -> StepSummary:
    """Medians of the steps after the first `warmup` ones.

    Raises: ShoalError: fewer steps than that were made.
    """
    measured = steps[warmup:]
    if not measured:
        raise ShoalError(f"the run made {len(steps)} steps, {warmup} of them warm-up; nothing is left to measure")

    def median(key: str) -> float:
        return statistics.median(float(step.get(key) or 0.0) for step in measured)

    return StepSummary(
        step_s=median("step_s"),
        stages={key: median(key) for key in _STAGES},
        tokens_per_s=median("tokens_per_s"),
        control_share=median("control_share"),
        push_pause_ms=median("push_pause_ms"),
        num_steps=len(measured),
    )


def training_flops(num_parameters: int, samples: int, tokens_per_sample: int) -> float:
    """FLOPs of forward and backward of actor and critic and forward of the reference, nothing computed twice."""
    return float(sum(_FLOPS_PER_PARAMETER_AND_TOKEN.values()) * num_parameters * samples * tokens_per_sample)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="shoal bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--size", choices=sorted(SIZES), default="nano", help="random model of this size")
    model.add_argument("--model", help="Hugging Face folder instead of a random model")
    parser.add_argument("--samples", type=int, default=256, help="samples per step")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--until-eos", action="store_true", help="stop at EOS: at most --max-new-tokens")
    parser.add_argument("--precision", choices=("float32", "bf16_mixed"), default="float32", help="of the trainer")
    parser.add_argument("--serving-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine and of the baseline")
    parser.add_argument("--keep", type=Path, help="keep the run folder here")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", help="any configuration override")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    if args.group < 1 or args.samples < args.group or args.samples % args.group:
        parser.error(f"--samples {args.samples} does not divide into groups of {args.group}; choose a multiple, or another --group")
    return args


def overrides_of(args: argparse.Namespace, model: Path, rows: Path, folder: Path) -> list[str]:
    """Configuration of the benchmark run."""
    return [
        f"run.id=bench-step-{os.getpid()}",
        f"run.folder={folder}",
        f"run.steps={args.warmup + args.steps}",
        f"model.path={model}",
        f"data.train={rows}",
        "reward.scorer=arithmetic",
        f"rollout.prompts_per_step={args.samples // args.group}",
        f"rollout.group_size={args.group}",
        f"rollout.max_new_tokens={args.max_new_tokens}",
        f"rollout.ignore_eos={'false' if args.until_eos else 'true'}",
        f"rollout.max_num_seqs={max(64, args.samples)}",
        f"rollout.threads={args.threads}",
        f"rollout.dtype={args.serving_dtype}",
        f"actor.precision={args.precision}",
        f"critic.precision={args.precision}",
        *args.set,
    ]


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the benchmark in a folder; returns the result."""
    dtype = "bfloat16" if args.precision == "bf16_mixed" else "float32"
    flops_per_s = matmul_flops_per_s(dtype, args.threads)
    model, rows, folder = work / "model", work / "rows.jsonl", work / "run"
    if args.model:
        model, num_parameters = Path(args.model).absolute(), _count_parameters(Path(args.model))
    else:
        num_parameters = write_random_model(args.size, model)
    write_sums(rows, args.samples)
    config = load_config(configs_folder() / "custom.yaml", overrides_of(args, model, rows, folder))
    with PeakMemory() as memory, open_view(Console(stderr=True)) as view:
        state = run_locally(config, view)
    if state != "finished":
        raise ShoalError(f"the benchmark run {state}; logs in {folder / 'logs'} (use --keep DIR to keep them)")
    steps = read_steps(folder / "metrics.jsonl")
    summary = summarise(steps, args.warmup)
    tokens = statistics.median(float(step["num_tokens"]) for step in steps[args.warmup :]) / args.samples
    ideal_s = training_flops(num_parameters, args.samples, round(tokens)) / flops_per_s
    return {
        "benchmark": "step",
        "model": args.model or args.size,
        "num_parameters": num_parameters,
        "samples": args.samples,
        "max_new_tokens": args.max_new_tokens,
        "precision": args.precision,
        "serving_dtype": args.serving_dtype,
        "step_s": summary.step_s,
        **summary.stages,
        "tokens_per_s": summary.tokens_per_s,
        "control_share": summary.control_share,
        "push_pause_ms": summary.push_pause_ms,
        "measured_steps": summary.num_steps,
        "peak_memory_mib": {role: round(mib) for role, mib in sorted(memory.peak_mib.items())},
        "baseline_matmul_gflop_per_s": flops_per_s / 1e9,
        "baseline_training_s": ideal_s,
        "ratio_step_to_baseline": summary.step_s / ideal_s,
    }


def _count_parameters(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    return int(AutoModelForCausalLM.from_pretrained(folder).num_parameters())


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m shoal_benchmarks.step`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        try:
            result = measure(args, work.absolute())
        except ShoalError as error:
            sys.stderr.write(f"shoal bench step: {error}\n")
            return 1
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return 0
    for key, value in result.items():
        sys.stdout.write(f"{key:30} {value:.4g}\n" if isinstance(value, float) else f"{key:30} {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
