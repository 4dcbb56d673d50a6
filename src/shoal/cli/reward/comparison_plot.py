"""The picture of a comparison: every sample's two rewards, and how long both revisions took."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.reward.compare import PERCENTILES, headline
from shoal.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_POINT = 10
_LARGEST_POINT = 400
"""Areas in square points."""


def draw_comparison(found: dict[str, Any], path: Path) -> None:
    """Write a PNG, or what else the file's name ends in.

    Raises: ConfigError: matplotlib is not installed. DataError: the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}); install shoal-rl[demo], or leave --plot out") from error
    figure, (points, latencies) = pyplot.subplots(1, 2, figsize=(11, 5), constrained_layout=True, width_ratios=(3, 2))
    try:
        figure.suptitle(headline(found))
        _draw_points(points, found)
        _draw_latencies(latencies, found)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise DataError(f"--plot {path} cannot be written ({error}); give the path of a .png file in a folder that exists") from error
    finally:
        pyplot.close(figure)


def _draw_points(axis: Axes, found: dict[str, Any]) -> None:
    # Rewards of few values lie on top of each other: the area of a point is the number of its samples.
    counts = Counter((point[0], point[1]) for point in found["points"])
    x, y = [place[0] for place in counts], [place[1] for place in counts]
    largest = max(counts.values(), default=1)
    axis.scatter(x, y, s=[_SMALLEST_POINT + _LARGEST_POINT * number / largest for number in counts.values()], alpha=0.35, linewidths=0)
    if x:
        low, high = min(*x, *y), max(*x, *y)
        axis.plot([low, high], [low, high], color="grey", linestyle="--", linewidth=1, label="the same reward")
        axis.legend(loc="upper left", frameon=False)
    axis.set_xlabel(f"reward by the active revision {found['active']}")
    axis.set_ylabel(f"reward by revision {found['number']}")
    axis.set_title(f"{counts.total()} samples, by area" if x else "no sample was scored by both")
    axis.grid(alpha=0.3)


def _draw_latencies(axis: Axes, found: dict[str, Any]) -> None:
    for offset, side, number in ((-0.2, "active", found["active"]), (0.2, "shadow", found["number"])):
        heights = [found["latency_ms"][side][name] or 0.0 for name in PERCENTILES]
        bars = axis.bar([place + offset for place in range(len(PERCENTILES))], heights, width=0.38, label=f"{side} ({number})")
        axis.bar_label(bars, fmt="%.3g", fontsize="small")
    axis.set_xticks(range(len(PERCENTILES)), PERCENTILES)
    axis.set_title("latency of a sample (ms)")
    # Below, where no bar can be behind it.
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
