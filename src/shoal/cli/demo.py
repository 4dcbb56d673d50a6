"""`shoal demo`: prepare a preset, run every service on this machine, train, report."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import shoal
from shoal.cli.curves import accuracy_name, draw_curves, read_steps
from shoal.cli.local_run import interruptible, run_locally
from shoal.cli.presets import prepare_preset
from shoal.cli.progress import open_view
from shoal.config.load import load_preset
from shoal.config.models import RunConfig
from shoal.errors import ConfigError, DataError
from shoal.queue.connection import check_reachable

_NO_PRESETS = {"custom", "compose"}
"""Configurations of other ways to start a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user asked for; None means the preset's own choice."""

    preset: str
    seed: int
    runs_folder: Path
    steps: int | None
    redis_url: str | None
    actor_ranks: int | None
    model: str | None
    data: str | None
    held_out: str | None
    reward: str | None
    overrides: tuple[str, ...]


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo; returns the exit code: 0 only if the run finished, or was stopped on request.

    Raises: ShoalError: with what is wrong and what to do; everything that was started has been stopped by then.
    """
    with interruptible():
        config = _resolve_config(options, console)
        if config.redis.url:
            check_reachable(config.redis.url)
        folder = Path(config.run.folder)
        with open_view(console) as view:
            state = run_locally(config, view)
    return _report(state, folder, console)


def _resolve_config(options: DemoOptions, console: Console) -> RunConfig:
    if options.model or options.data:
        return _load(options, "custom", _own_overrides(options))
    if options.held_out:
        raise ConfigError(f"--held-out {options.held_out} belongs to --model and --data; a preset has its own held-out rows")
    _check_preset(options.preset)
    # Before preparing, which may take minutes: the paths are not looked at here.
    _load(options, options.preset, ["model.path=to-be-prepared", "data.train=to-be-prepared", "data.held_out=to-be-prepared"])
    return _load(options, options.preset, _preset_overrides(options, console))


def _load(options: DemoOptions, name: str, overrides: list[str]) -> RunConfig:
    # The process id tells apart two runs that start within a second; staging files carry the name too.
    run_id = f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    chosen = [f"run.id={run_id}", f"run.folder={options.runs_folder.absolute() / run_id}", f"run.seed={options.seed}", *overrides]
    if options.steps is not None:
        chosen.append(f"run.steps={options.steps}")
    if options.actor_ranks is not None:
        chosen.append(f"actor.ranks={options.actor_ranks}")
    if options.redis_url is not None:
        chosen.append(f"redis.url={options.redis_url}")
    if options.reward is not None:
        chosen.append(f"reward.scorer={options.reward}")
    return load_preset(configs_folder() / f"{name}.yaml", [*chosen, *options.overrides])


def _own_overrides(options: DemoOptions) -> list[str]:
    by_source = any(override.startswith("reward.sources") for override in options.overrides)
    if not (options.model and options.data and (options.reward or by_source)):
        raise ConfigError(
            "--model, --data and --reward belong together: give all three (--set reward.sources may stand in for --reward), or none for a "
            "preset"
        )
    for option, path in (("--data", options.data), ("--held-out", options.held_out)):
        if path and not Path(path).exists():
            raise DataError(f"{option} {path} does not exist; give a JSONL or Parquet file, or the folder of a data set")
    chosen = [f"model.path={options.model}", f"data.train={Path(options.data).absolute()}"]
    if options.held_out:
        chosen.append(f"data.held_out={Path(options.held_out).absolute()}")
    return chosen


def _check_preset(name: str) -> None:
    known = sorted({path.stem for path in configs_folder().glob("*.yaml")} - _NO_PRESETS)
    if name not in known:
        raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(known)}")


def _preset_overrides(options: DemoOptions, console: Console) -> list[str]:
    started = time.monotonic()
    prepared = prepare_preset(options.preset, options.seed)
    how = "found in the cache" if prepared.cached else f"prepared in {time.monotonic() - started:.0f} s"
    console.print(f"preset {options.preset}, seed {options.seed}: {how}", highlight=False)
    return [f"model.path={prepared.model}", f"data.train={prepared.train}", f"data.held_out={prepared.held_out}"]


def configs_folder() -> Path:
    """Where the run configurations are: inside the installed package, or beside it in a checkout."""
    package = Path(shoal.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parents[1] / "configs"


def _report(state: str, folder: Path, console: Console) -> int:
    report_path = folder / "report.json"
    if state == "failed" or not report_path.exists():
        console.print(f"the run {state}; logs in {folder / 'logs'}", highlight=False)
        return 1
    report: dict[str, Any] = json.loads(report_path.read_text())
    steps = read_steps(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    draw_curves(steps, report, folder / "curves.png")
    for line in summary_lines(report, folder):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def summary_lines(report: dict[str, Any], folder: Path) -> list[str]:
    """What the terminal shows at the end."""
    lines = []
    before, after = report.get("accuracy_before"), report.get("accuracy_after")
    if before is not None and after is not None:
        lines.append(f"{accuracy_name(report)}: {before:.1%} before, {after:.1%} after ({100 * (after - before):+.1f} points)")
    lines.append(f"{report['steps']} steps in {report['wall_s']:.1f} s")
    files = ("report.json", "curves.png", "metrics.jsonl", "export")
    lines.extend(f"  {folder / name}" for name in files if (folder / name).exists())
    return lines
