"""The reward benchmark: its arithmetic, its data, the ways that it compares, and one short run of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from shoal_benchmarks.reward import parse_args, service_file, summary_of_math, summary_of_rates
from shoal_benchmarks.reward_bare import part_of
from shoal_benchmarks.reward_calls import (
    Endpoint,
    caller,
    group_of,
    measure_calls,
    measure_pass,
    measure_ways,
    route_of,
    route_scorer,
    score_in_process,
)
from shoal_benchmarks.reward_corpus import math_items, math_samples, text_samples
from shoal_benchmarks.reward_processes import LineProcess
from shoal_benchmarks.reward_scorers import NAME, VERSION
from shoal_benchmarks.reward_summary import Measured, added_ms, latencies, median_rate, spread

from shoal.cli.bench import BENCHMARKS
from shoal.clients.reward import RewardClient
from shoal.config.reward_service import load_reward_service
from shoal.errors import ShoalError
from shoal.types import ScorerDescription, ScoreResult, ScoreSample, ScoreStatus

SCORER = ScorerDescription(name=NAME, version=VERSION, description="", fingerprint="f")


class FakeClient:
    """Scores with the function; one that fails gives no score. calls: samples of each."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[list[ScoreSample]] = []
        self.num_open = self.most_open = 0

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        self.calls.append(list(samples))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        status = ScoreStatus.ERROR if self.fails else ScoreStatus.SCORED
        values = score_in_process(samples)
        return version, [
            ScoreResult(sample_id=sample.sample_id, status=status, value=value, message="broken")
            for sample, value in zip(samples, values, strict=True)
        ]


def as_client(fake: FakeClient) -> RewardClient:
    return cast("RewardClient", fake)


def rates_of(*seconds: float) -> list[Measured]:
    return [Measured(num_samples=100, seconds=each) for each in seconds]


def test_rates_are_medians_with_their_spread() -> None:
    measured = rates_of(1.0, 4.0, 2.0)
    assert (median_rate(measured), spread(measured)) == (50.0, {"min": 25.0, "max": 100.0})


def test_latencies_are_percentiles_and_added_ones_are_of_the_differences_in_a_round() -> None:
    rounds = {"route": [0.003, 0.005, 0.004], "client": [0.002, 0.001, 0.002]}
    assert latencies(rounds)["client"]["p50"] == pytest.approx(2.0)
    # 1, 4 and 2 ms.
    added = added_ms(rounds, "route", "client")
    assert (added["p50"], added["p99"]) == pytest.approx((2.0, 3.96))


def test_summaries_divide_what_they_say() -> None:
    rates = summary_of_rates({"served": rates_of(2.0), "echo": rates_of(1.0), "function": rates_of(0.1)})
    assert (rates["samples_per_s"], rates["ratio_to_echo"], rates["baseline_function_samples_per_s"]) == pytest.approx((50, 0.5, 1000))
    measured = {"service": rates_of(1.0), "math_verify": rates_of(2.0), "verifier": rates_of(0.5)}
    math = summary_of_math(measured, {"service": 50.0, "math_verify": 60.0, "verifier": 50.0}, 100)
    assert (math["ratio_math_to_math_verify"], math["ratio_math_to_loop"]) == (2.0, 0.5)
    assert math["math_right_share"] == {"service": 0.5, "math_verify": 0.6, "verifier": 0.5}


def test_corpus_is_the_same_for_a_seed_and_no_answer_comes_twice_among_kinds_that_are_parsed() -> None:
    items = math_items(300, seed=1)
    assert items == math_items(300, seed=1)
    assert len({(item.gold, item.response) for item in items}) == 300
    assert not {item.response for item in items} & {item.response for item in math_items(300, seed=2)}
    assert [sample.row["answer"] for sample in math_samples(items, "x")] == [item.gold for item in items]


def test_function_finds_three_of_five_texts_right() -> None:
    values = score_in_process(text_samples(1000))
    assert 0.55 < sum(value > 0 for value in values) / 1000 < 0.65


def test_workers_share_all_items() -> None:
    items = math_items(11, seed=0)
    parts = [part_of(items, worker, 3) for worker in range(3)]
    assert sorted(map(len, parts)) == [3, 4, 4]
    assert {id(item) for part in parts for item in part} == {id(item) for item in items}


def test_every_worker_gets_every_kind_of_item() -> None:
    items = list(range(12))
    assert [{item % 6 for item in part_of(items, worker, 2)} for worker in range(2)] == [set(range(6))] * 2


async def test_pass_scores_every_batch_once_with_so_many_calls_open() -> None:
    client, batches = FakeClient(), [text_samples(4, seed=seed) for seed in range(7)]
    measured = await measure_pass(caller(as_client(client), NAME, VERSION), batches, in_flight=3)
    assert (measured.num_samples, client.most_open) == (28, 3)
    assert sorted(call[0].prompt for call in client.calls) == sorted(batch[0].prompt for batch in batches)


async def test_calls_count_what_was_scored_until_the_time_is_over() -> None:
    client = FakeClient()
    measured = await measure_calls(caller(as_client(client), NAME, VERSION), [text_samples(4)], in_flight=2, seconds=0.05)
    assert measured.num_samples == 4 * len(client.calls) > 0
    assert measured.seconds >= 0.05


async def test_samples_without_a_score_are_not_timed() -> None:
    with pytest.raises(ShoalError, match=r"bench-0/0/1.*broken"):
        await measure_pass(caller(as_client(FakeClient(fails=True)), NAME, VERSION), [text_samples(2)], in_flight=1)


async def test_route_scores_a_group_as_the_client_does() -> None:
    client, samples = FakeClient(), text_samples(4)
    route = route_scorer(Endpoint(client=as_client(client), scorers=[SCORER]))
    (scored,) = await route.score([(group_of(samples, "g"), route_of(SCORER))])
    (sent,) = client.calls
    assert [sample.response for sample in sent] == [sample.response for sample in samples]
    assert [result.value for result in scored.results] == score_in_process(sent)


async def test_ways_are_timed_side_by_side_after_the_warmup() -> None:
    client = FakeClient()
    rounds = await measure_ways(as_client(client), SCORER, [text_samples(2), text_samples(3)], num_rounds=5, num_warmup=2)
    assert {way: len(seconds) for way, seconds in rounds.items()} == {"function": 5, "client": 5, "route": 5}
    assert [len(call) for call in client.calls] == [2, 2, 3, 3] * 3 + [2, 2]


def test_reward_server_gets_the_function_and_the_verifier_with_their_limits_on(tmp_path: Path) -> None:
    path = service_file(tmp_path, 3)
    settings = load_reward_service(path)
    assert (settings.workers, list(settings.scorers)) == (3, ["bench_math"])
    assert set(yaml.safe_load(path.read_text())) == {"modules", "scorers", "workers"}


@pytest.mark.parametrize("argument", ["--batch", "--repeats", "--cores", "--workers"])
def test_numbers_below_one_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([argument, "0"])
    assert f"{argument} is 0; give a number above 0" in capsys.readouterr().err


def test_process_that_ends_says_its_last_words(tmp_path: Path) -> None:
    with (
        LineProcess("shoal_benchmarks.reward_bare", ["--worker", "x"], tmp_path / "bare.log") as process,
        pytest.raises(ShoalError, match="invalid int value: 'x'"),
    ):
        process.answer()


def test_reward_is_a_benchmark_of_the_command() -> None:
    assert "reward" in BENCHMARKS


@pytest.mark.slow
def test_short_run_answers_with_every_number(tmp_path: Path) -> None:
    argv = ["--seconds", "0.2", "--repeats", "1", "--rounds", "20", "--math-samples", "24", "--batch", "32", "--json"]
    command = [sys.executable, "-m", "shoal_benchmarks.reward", *argv, "--keep", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    rates = SimpleNamespace(**result)
    assert min(rates.samples_per_s, rates.baseline_echo_samples_per_s, rates.math_samples_per_s, rates.added_to_function_ms["p50"]) > 0
    assert set(rates.math_right_share) == {"service", "math_verify", "verifier"}
    assert len(set(rates.math_right_share.values())) == 1
    assert "shoal_reward" in rates.peak_memory_mib
