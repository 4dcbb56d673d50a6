"""The push benchmark: arguments, the numbers it derives, and one run of it with a scripted engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shoal_benchmarks.models import PARAMETER_SIZES, ModelSize
from shoal_benchmarks.push import configuration, parse_args
from shoal_benchmarks.push_methods import fill, raw_bytes
from shoal_benchmarks.push_processes import listening_address
from shoal_benchmarks.push_summary import Measured, Rates, ratios, summarise
from shoal_benchmarks.push_traffic import Sample, tokens_between
from shoal_coordinator.push_report import PushReport, ServerReport

from shoal.cli.bench import BENCHMARKS
from shoal.config.load import load_config
from shoal.errors import ConfigError
from shoal.weights.llama_layouts import LlamaShape, tensors_of
from shoal.weights.stages import PushStage


def report(transfer_s: float, *, pause_ms: float = 2.0, sent_bytes: int = 100) -> PushReport:
    server = ServerReport(
        server_id="rollout-0", dense=False, stage=PushStage.COMMITTED, pause_ms=pause_ms, sent_bytes=sent_bytes, dense_bytes=100
    )
    stages: dict[str, float] = {PushStage.PREPARE: 0.1, PushStage.TRANSFER: transfer_s, PushStage.VERIFY: 0.3, PushStage.COMMIT: 0.1}
    return PushReport(
        push_id="p",
        policy_version=1,
        state=PushStage.COMMITTED,
        stages_s=stages,
        servers={"rollout-0": server},
        error=None,
        started_unix_s=0.0,
    )


def test_summary_takes_stages_of_idle_pushes_and_the_pause_of_busy_ones() -> None:
    idle = [Measured(report=report(transfer_s, pause_ms=1.0)) for transfer_s in (0.2, 0.4, 0.3)]
    busy = [Measured(report=report(0.9, pause_ms=pause_ms), tokens=tokens) for pause_ms, tokens in ((5.0, 10.0), (7.0, 20.0), (6.0, 12.4))]
    result = summarise(idle, busy, Rates(without_push=50.0, during_push=40.0))
    assert (result["transfer_s"], result["transfer_min_s"], result["stages"]["verify"]) == (0.3, 0.2, 0.3)
    assert result["transfer_mb_per_s"] == pytest.approx(100 / 1e6 / 0.3)
    assert (result["pause_s"], result["pause_max_s"], result["pause_idle_s"]) == pytest.approx((0.006, 0.007, 0.001))
    assert (result["tokens_during_push"], result["tokens_per_s_during_push"]) == (12, 40.0)
    assert result["stages_busy"]["transfer"] == 0.9
    assert result["push_s"] == pytest.approx(0.8)


def test_summary_without_load_says_that_nothing_was_generated() -> None:
    result = summarise([Measured(report=report(0.2, sent_bytes=5))], [], None)
    assert (result["tokens_during_push"], result["pause_s"], result["delta_share"]) == (0, 0.002, 0.05)
    assert "stages_busy" not in result


def test_ratios_compare_with_the_baselines_of_the_same_run() -> None:
    result = {
        "transfer_s": 0.2,
        "push_s": 0.5,
        "memcpy_s": 0.1,
        "gather_broadcast_s": 1.0,
        "safetensors_s": 2.0,
        "grpc_stream_s": 0.15,
    }
    compared = ratios(result, "shm")
    assert compared["transfer_to_memcpy"] == pytest.approx(2.0)
    assert compared["gather_broadcast_to_transfer"] == pytest.approx(5.0)
    assert "rate_to_grpc_stream" not in compared
    assert ratios(result, "grpc")["rate_to_grpc_stream"] == pytest.approx(0.75)
    assert ratios({"transfer_s": 0.2}, "shm") == {}


def test_tokens_between_spreads_a_request_over_its_duration() -> None:
    samples = [Sample(start_s=0.0, end_s=4.0, num_tokens=16), Sample(start_s=3.0, end_s=5.0, num_tokens=10)]
    assert tokens_between(samples, 0.0, 5.0) == pytest.approx(26)
    assert tokens_between(samples, 1.0, 2.0) == pytest.approx(4)
    assert tokens_between(samples, 3.5, 4.5) == pytest.approx(2 + 5)
    assert tokens_between(samples, 6.0, 7.0) == 0


def test_listening_address_is_read_from_the_log() -> None:
    line = json.dumps({"event": "server_listening", "address": "127.0.0.1:4711"})
    assert listening_address("") == ""
    assert listening_address(f"starting\n{line}\n") == "127.0.0.1:4711"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fill_gives_every_process_the_same_finite_values(dtype: str) -> None:
    shapes = {"a": (3, 4), "b": (5,)}
    one, other = fill(shapes, dtype), fill(shapes, dtype)
    for name, shape in shapes.items():
        assert one[name].shape == shape
        assert torch.isfinite(one[name]).all()
        assert torch.equal(raw_bytes(one[name]), raw_bytes(other[name]))


def num_parameters(size: ModelSize) -> int:
    shape = LlamaShape(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        intermediate_size=size.intermediate,
        vocab_size=size.vocab,
        tied=True,
        qkv_bias=True,
    )
    return sum(math.prod(tensor) for tensor in tensors_of(shape).values())


@pytest.mark.parametrize("name", list(PARAMETER_SIZES))
def test_sizes_have_about_as_many_parameters_as_they_are_called_after(name: str) -> None:
    wanted = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert 0.8 * wanted <= num_parameters(PARAMETER_SIZES[name]) <= 1.3 * wanted


def test_configuration_follows_the_arguments_and_overrides(tmp_path: Path) -> None:
    args = parse_args(["--ranks", "2", "--tp", "2", "--transport", "grpc", "--dtype", "bfloat16", "--set", "push.grpc_streams=4"])
    config = configuration(args, tmp_path / "model", tmp_path)
    assert (config.push.transport, config.push.grpc_streams) == ("grpc", 4)
    assert (config.rollout.tensor_parallel_size, config.rollout.dtype, config.actor.ranks) == (2, "bfloat16", 2)
    assert load_config(tmp_path / "run.yaml") == config


def test_configuration_refuses_a_setting_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grpc_streems"):
        configuration(parse_args(["--set", "push.grpc_streems=4"]), tmp_path / "model", tmp_path)


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--params", "7M"], ["--params", "5M", "--model", "m"], ["--transport", "pigeon"]])
def test_arguments_that_cannot_be_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments)


def test_push_is_a_benchmark_of_the_command() -> None:
    assert "push" in BENCHMARKS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_benchmark_pushes_from_two_ranks_and_measures_the_baselines() -> None:
    command = [sys.executable, "-m", "shoal_benchmarks.push", "--params", "1M", "--ranks", "2", "--tp", "2", "--engine", "scripted"]
    ended = subprocess.run([*command, "--pushes", "2", "--repeats", "1", "--json"], check=True, stdout=subprocess.PIPE, timeout=380)
    result = json.loads(ended.stdout)
    # Both workers hold the norms.
    assert result["bytes"] >= 4 * result["num_parameters"]
    assert result["sent_bytes"] == result["bytes"]
    for key in ("transfer_s", "memcpy_s", "pause_s", "gather_broadcast_s", "grpc_stream_s", "safetensors_s"):
        assert result[key] > 0
    assert set(result["stages"]) == {"prepare", "transfer", "verify", "commit"}
    assert result["tokens_during_push"] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_benchmark_counts_tokens_and_deltas_with_a_real_engine() -> None:
    command = [sys.executable, "-m", "shoal_benchmarks.push", "--params", "1M", "--dtype", "bfloat16", "--change", "adam"]
    command += ["--set", "push.delta=on", "--pushes", "2", "--no-baselines", "--json"]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=380)
    result = json.loads(ended.stdout)
    assert result["tokens_during_push"] > 0
    assert 0 < result["delta_share"] < 0.5
    assert result["ratios"] == {}
