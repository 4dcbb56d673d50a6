"""The arithmetic of the step benchmark."""

from __future__ import annotations

import pytest
from shoal_benchmarks.machine import role_of
from shoal_benchmarks.step import parse_args, summarise, training_flops

from shoal.errors import ShoalError


def test_summarise_takes_medians_after_the_warmup() -> None:
    steps = [{"step_s": value, "rollout_s": value / 2} for value in (9.0, 1.0, 3.0, 2.0)]
    summary = summarise(steps, warmup=1)
    assert (summary.step_s, summary.stages["rollout_s"], summary.num_steps) == (2.0, 1.0, 3)


def test_summarise_refuses_a_run_that_was_all_warmup() -> None:
    with pytest.raises(ShoalError, match="made 1 steps, 2 of them warm-up"):
        summarise([{"step_s": 1.0}], warmup=2)


def test_training_flops_match_the_published_figure_for_micro() -> None:
    # 9.5 M parameters, 64 samples of 72 tokens: 614 GFLOP (actor 263, critic 263, reference 88).
    assert training_flops(9_500_000, 64, 72) == pytest.approx(614e9, rel=0.01)


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("python -m shoal_rollout --config x", "shoal_rollout"),
        ("python -m torch.distributed.run -m shoal_trainer --role actor", ""),
        ("python -m shoal_trainer --role actor", "actor"),
        ("bash", ""),
    ],
)
def test_role_of_names_services_and_skips_launchers(command_line: str, role: str) -> None:
    assert role_of(command_line) == role


def test_step_refuses_samples_that_do_not_divide_into_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--samples", "250", "--group", "8"])
    assert "--samples 250 does not divide into groups of 8" in capsys.readouterr().err
