"""The picture of a run: reward, KL, length and where the time went, from metrics.jsonl."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Step = dict[str, Any]

_STAGES = ("rollout_s", "reward_s", "forward_s", "advantages_s", "update_s", "push_s")
_FEWEST_EVALUATIONS = 3
"""Those before and after are in the title."""


def read_steps(path: Path) -> list[Step]:
    """Steps of a metrics.jsonl, oldest first.

    Raises: DataError: the file is missing or a line is not JSON.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; did the run finish a step?") from error
    try:
        return [json.loads(line) for line in lines if line]
    except json.JSONDecodeError as error:
        raise DataError(f"{path} has a line that is not JSON: {error}") from error


def draw_curves(steps: list[Step], report: dict[str, Any], path: Path) -> None:
    """Write a PNG with four panels; nothing is drawn for metrics that the run did not have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    figure.suptitle(_title(report))
    _line(axes[0][0], steps, "reward", "mean reward", smooth=True)
    _accuracy(axes[0][0], report)
    _line(axes[0][1], steps, "kl", "KL to the reference (per token)")
    _line(axes[1][0], steps, "response_length", "response length (tokens)")
    _stages(axes[1][1], steps)
    swaps = reward_swaps(steps)
    for axis in axes.flat:
        _mark(axis, swaps)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def accuracy_name(report: dict[str, Any]) -> str:
    """What the accuracy of a run's report is of: greedy answers, or sampled ones."""
    temperature = report.get("config", {}).get("evaluation", {}).get("temperature", 0)
    return f"held-out accuracy at temperature {temperature:g}" if temperature else "greedy held-out accuracy"


def _title(report: dict[str, Any]) -> str:
    before, after = report.get("accuracy_before"), report.get("accuracy_after")
    if before is None or after is None:
        return str(report.get("run_id", ""))
    return f"{report.get('run_id', '')}: {accuracy_name(report)} {before:.1%} before, {after:.1%} after"


def _series(steps: list[Step], key: str) -> tuple[list[float], list[float]]:
    pairs = [(float(s["step"]), float(s[key])) for s in steps if s.get(key) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def reward_swaps(steps: list[Step]) -> list[tuple[float, int]]:
    """(step, revision) of the first step of each reward revision but the first one."""
    x, y = _series(steps, "reward_revision")
    pairs = list(zip(x, y, strict=True))
    return [(step, int(revision)) for (_, before), (step, revision) in itertools.pairwise(pairs) if revision != before]


def _mark(axis: Axes, swaps: list[tuple[float, int]]) -> None:
    """A line where another revision of the reward begins."""
    for step, revision in swaps:
        # The step before was scored by another revision: the border is between the two.
        axis.axvline(step - 0.5, color="tab:red", linestyle="--", linewidth=1.2)
        axis.annotate(
            f"reward revision {revision}",
            (step - 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            rotation=90,
            color="tab:red",
            fontsize="small",
        )


def _line(axis: Axes, steps: list[Step], key: str, title: str, smooth: bool = False) -> None:
    x, y = _series(steps, key)
    axis.plot(x, y, linewidth=1.0, alpha=0.4 if smooth else 1.0)
    if smooth:
        axis.plot(x, _smoothed(x, y, [step for step, _ in reward_swaps(steps)]), linewidth=2.0, label="mean of 10 steps")
        axis.legend(loc="lower right", frameon=False)
    axis.set_title(title)


def _accuracy(axis: Axes, report: dict[str, Any]) -> None:
    """Evaluations on an axis of their own: unlike a reward, they mean the same before and after a swap."""
    evaluations = report.get("evaluations", [])
    if len(evaluations) < _FEWEST_EVALUATIONS:
        return
    other = axis.twinx()
    other.plot([each["step"] for each in evaluations], [each["accuracy"] for each in evaluations], "o-", color="tab:green", markersize=4)
    other.set_ylim(0, 1)
    other.set_ylabel(accuracy_name(report), color="tab:green")


def _smoothed(x: list[float], y: list[float], borders: list[float]) -> list[float]:
    """Mean of the last 10 values; never of values on both sides of a border, where y means something else."""
    means = []
    for i, step in enumerate(x):
        first = max((border for border in borders if border <= step), default=x[0])
        window = [value for at, value in zip(x[max(0, i - 9) : i + 1], y[max(0, i - 9) : i + 1], strict=True) if at >= first]
        means.append(sum(window) / len(window))
    return means


def _stages(axis: Axes, steps: list[Step]) -> None:
    x = [float(s["step"]) for s in steps]
    layers = [[float(s.get(key) or 0.0) for s in steps] for key in _STAGES]
    axis.stackplot(x, *layers, labels=[key.removesuffix("_s") for key in _STAGES], alpha=0.8)
    axis.set_title("seconds per step by stage")
    axis.legend(loc="upper right", ncols=3, fontsize="small")
