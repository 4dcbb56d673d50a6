"""`shoal reward compare`: the report in words and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_coordinator.rest_reward_models import ComparisonModel
from typer.testing import CliRunner, Result

from shoal.cli.main import app
from shoal.cli.reward.comparison_plot import draw_comparison
from shoal.errors import DataError, ShoalError
from tests.helpers.fake_rest import Answer, error, fake_rest

WORST = [
    {"sample_id": f"u/{i}/0", "prompt": "2+2\n=", "response": "\x1b[31m[red]4", "active": 1.0 - i / 4, "shadow": 0.25 * i} for i in range(3)
]
FOUND: Answer = {
    "number": 2,
    "active": 1,
    "num_groups": 40,
    "num_samples": 160,
    "num_dropped": 3,
    "mean": {"active": 0.5, "shadow": 0.625},
    "std": {"active": 0.25, "shadow": 0.5},
    "pearson": 0.75,
    "spearman": 0.8125,
    "num_pairs": 200,
    "ranking_disagreement": 0.125,
    "latency_ms": {"active": {"p50": 1.0, "p95": 2.0, "p99": 3.0}, "shadow": {"p50": 10.0, "p95": 20.0, "p99": 31.25}},
    "error_share": {"active": 0.0, "shadow": 0.0125},
    "not_scored_share": {"active": 0.0, "shadow": 0.5},
    "points": [[0.0, 0.1], [1.0, 0.9], [0.5, 0.5]],
    "worst": WORST,
    "first_error": "judge@1: the endpoint answered 500",
}
NOTHING: Answer = {
    **FOUND,
    "num_groups": 0,
    "num_samples": 0,
    "num_dropped": 0,
    "num_pairs": 0,
    "mean": {"active": None, "shadow": None},
    "std": {"active": None, "shadow": None},
    "pearson": None,
    "spearman": None,
    "ranking_disagreement": None,
    "latency_ms": {key: {"p50": None, "p95": None, "p99": None} for key in ("active", "shadow")},
    "error_share": {"active": None, "shadow": None},
    "not_scored_share": {"active": None, "shadow": None},
    "points": [],
    "worst": [],
    "first_error": None,
}


def answer(found: Answer) -> Answer:
    return ComparisonModel.model_validate(found).model_dump(mode="json")


def compare(found: Answer, *arguments: str) -> Result:
    with fake_rest({"GET /v1/rewards/routes/2/comparison": answer(found)}) as rest:
        return CliRunner().invoke(app, ["reward", "compare", "2", "--address", rest.address, *arguments])


def test_compare_shows_numbers_of_both_sides() -> None:
    lines = compare(FOUND, "--worst", "0").stdout.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "revision 2 beside 1: 160 samples, rank correlation 0.812, correlation 0.750",
        "40 groups, 3 groups left out since it was too slow; 200 pairs of siblings, of which 12.5% are ordered otherwise",
        "active (1) shadow (2)",
        "mean 0.5 0.625",
        "standard deviation 0.25 0.5",
        "latency p50 (ms) 1 10",
        "latency p95 (ms) 2 20",
        "latency p99 (ms) 3 31.2",
        "errors 0.00% 1.25%",
        "not scored 0.00% 50.00%",
        "first error of the shadow: judge@1: the endpoint answered 500",
    ]


def test_compare_shows_the_worst_cases_with_their_text_on_lines_of_their_own() -> None:
    lines = compare(FOUND, "--worst", "2").stdout.splitlines()
    assert lines[-6:-3] == [
        "  u/0/0: active 1, shadow 0",
        "    prompt:   2+2\\n=",
        "    response: \\x1b[31m[red]4",
    ]
    assert lines[-3] == "  u/1/0: active 0.75, shadow 0.25"


def test_compare_says_dashes_where_nothing_can_be_said() -> None:
    lines = compare(NOTHING).stdout.splitlines()
    assert lines[0] == "revision 2 beside 1: 0 samples, rank correlation -, correlation -"
    assert lines[3].split() == ["mean", "-", "-"]
    assert lines[-1].split() == ["not", "scored", "-", "-"]


def test_compare_prints_json() -> None:
    assert json.loads(compare(FOUND, "--json").stdout) == answer(FOUND)


@pytest.mark.parametrize("found", [FOUND, NOTHING], ids=["samples", "none"])
def test_compare_draws_a_picture(tmp_path: Path, found: Answer) -> None:
    file = tmp_path / "comparison.png"
    result = compare(found, "--plot", str(file))
    assert result.exit_code == 0, result.exception
    assert file.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.splitlines()[-1] == f"drawn in {file}"


@pytest.mark.parametrize("name", ["no-folder/x.png", "x.docx"])
def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        draw_comparison(FOUND, tmp_path / name)


def test_compare_says_that_a_revision_is_no_shadow() -> None:
    refused = error(409, "revision 2 scores nothing beside the active one: start it with shadow")
    with fake_rest({"GET /v1/rewards/routes/2/comparison": refused}) as rest:
        result = CliRunner().invoke(app, ["reward", "compare", "2", "--address", rest.address])
    assert isinstance(result.exception, ShoalError)
    assert str(result.exception) == "revision 2 scores nothing beside the active one: start it with shadow"
