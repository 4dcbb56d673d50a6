"""The picture of a run: where the reward was swapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from shoal.cli.curves import draw_curves, reward_swaps

STEPS = [
    {"step": i, "reward": 1.0 if i < 4 else 0.0, "reward_revision": revision} for i, revision in enumerate([1, 1, 1, 3, 3, 2], start=1)
]


def drawn(
    steps: list[dict[str, float]], folder: Path, monkeypatch: pytest.MonkeyPatch, evaluations: Sequence[dict[str, float]] = ()
) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw_curves(steps, {"run_id": "run", "evaluations": list(evaluations)}, folder / "curves.png")
    return figures[0]


def test_swaps_are_the_first_steps_of_other_revisions() -> None:
    assert reward_swaps(STEPS) == [(4.0, 3), (6.0, 2)]
    assert reward_swaps([{"step": 1.0}, *STEPS[:2]]) == []


def test_every_panel_marks_and_names_each_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for axis in drawn(STEPS, tmp_path, monkeypatch).axes:
        lines = [line for line in axis.lines if line.get_linestyle() == "--"]
        assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[3.5, 3.5], [5.5, 5.5]]
        assert [text.get_text() for text in axis.texts] == ["reward revision 3", "reward revision 2"]


def test_the_smoothed_reward_does_not_mix_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = drawn(STEPS, tmp_path, monkeypatch).axes[0]
    (smooth,) = (line for line in rewards.lines if line.get_label() == "mean of 10 steps")
    assert np.asarray(smooth.get_ydata()).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_run_with_one_revision_has_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(not axis.texts for axis in drawn(STEPS[:3], tmp_path, monkeypatch).axes)


def test_evaluations_are_drawn_on_an_axis_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations = [{"step": step, "accuracy": accuracy} for step, accuracy in ((0, 0.4), (3, 0.1), (6, 0.7))]
    assert len(drawn(STEPS, tmp_path, monkeypatch, evaluations[:2]).axes) == 4
    axis = drawn(STEPS, tmp_path, monkeypatch, evaluations).axes[4]
    (line,) = axis.lines
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0.4], [3, 0.1], [6, 0.7]]
    assert (axis.get_ylim(), axis.get_ylabel()) == ((0.0, 1.0), "greedy held-out accuracy")
