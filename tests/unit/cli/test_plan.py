"""`shoal plan`: shapes, numbers and what is printed."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cli.plan import format_bytes, heat_map, show_plan
from shoal.cli.plan_report import PlanOptions, Spread, report_plan
from shoal.cli.plan_shapes import SHAPES, choose_shape, shape_of_model
from shoal.errors import ConfigError, TransportError
from shoal.weights.llama_layouts import LlamaShape, tensors_of

TINY = LlamaShape(num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2, intermediate_size=12, vocab_size=64)
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def options(**changes: Any) -> PlanOptions:  # noqa: ANN401 - any option
    defaults: dict[str, Any] = {
        "shape": TINY,
        "num_ranks": 4,
        "trainer_tp": 1,
        "replicas": 1,
        "num_engines": 2,
        "tp": 2,
        "dtype": "bfloat16",
        "bucket_bytes": 4096,
        "transport": "auto",
        "device": "cuda",
        "same_host": False,
    }
    return PlanOptions(**(defaults | changes))


def num_elements(shape: LlamaShape) -> int:
    return sum(first * (rest[0] if rest else 1) for first, *rest in tensors_of(shape).values())


def test_report_adds_up_to_the_model() -> None:
    report = report_plan(options())
    assert report.num_parameters == num_elements(TINY)
    norms = 3 * 8
    assert report.engine_bytes == Spread(count=2, min=report.num_bytes // 2, median=report.num_bytes // 2, max=report.num_bytes // 2)
    # Both workers of an engine need the norms.
    assert report.engine_bytes.max == 2 * (report.num_parameters + norms)
    assert report.rank_bytes.count == 4
    assert report.worker_bytes.count == 4
    assert sum(report.matrix.values()) == report.num_bytes
    assert report.link_bytes.count == len(report.matrix) == sum(report.transports.values())
    assert report.shadow_bytes.max * 4 >= 2 * report.num_parameters
    assert report.largest_bucket_bytes <= 4096


def test_replicas_share_the_sending() -> None:
    alone, shared = (report_plan(options(num_ranks=ranks, replicas=replicas)) for ranks, replicas in ((2, 1), (4, 2)))
    assert shared.num_bytes == alone.num_bytes
    assert shared.rank_bytes.max < alone.rank_bytes.max


@pytest.mark.parametrize(
    ("changes", "transport"),
    [
        ({}, "collective"),
        ({"same_host": True}, "cuda_ipc"),
        ({"device": "cpu"}, "grpc"),
        ({"device": "cpu", "same_host": True}, "shm"),
        ({"transport": "shm"}, "shm"),
        ({"transport": "grpc"}, "grpc"),
    ],
)
def test_transport_follows_from_where_both_sides_are(changes: dict[str, Any], transport: str) -> None:
    assert set(report_plan(options(**changes)).transports) == {transport}


def test_a_transport_that_cannot_connect_is_refused() -> None:
    with pytest.raises(TransportError, match="rollout-0: transport cuda_ipc does not reach worker 0"):
        report_plan(options(transport="cuda_ipc", device="cpu"))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_command_prints_a_table_and_a_heat_map_for_a_small_layout() -> None:
    output = run("--shape", "smollm2-135m", "--ranks", "4", "--tp", "3", "--trainer-tp", "2")
    assert "134,515,008 parameters in bfloat16, 4 trainer ranks (TP 2) to 1 engine of TP 3" in output
    assert "per link (rank to worker)" in output
    assert "12 x collective" in output
    assert "rank \\ worker" in output
    assert sum(line.startswith("   ") and "|" in line for line in output.splitlines()) == 4


def test_command_prints_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    document = json.loads(run("--model", str(tmp_path), "--ranks", "3", "--engines", "2", "--device", "cpu", "--json"))
    assert document["options"]["shape"]["qk_norm"] is True
    assert document["transports"] == {"grpc": 6}
    assert document["num_bytes"] == 2 * document["engine_bytes"]["min"]
    assert "matrix" not in document


def test_a_large_layout_has_no_heat_map() -> None:
    assert "rank \\ worker" not in run("--shape", "smollm2-135m", "--ranks", "64")


def test_heat_map_shows_every_link_and_leaves_the_others_blank() -> None:
    lines = heat_map({(0, 0, 0): 100, (0, 1, 1): 1, (1, 0, 1): 50}, num_ranks=2, num_engines=2, tp=2).plain.splitlines()
    assert lines[1:] == ["   0 |██  |  ░░|", "   1 |  ▒▒|    |"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16 << 20, "16.8 MB"), (141_125_877_760, "141.1 GB"), (2_260_000_000_000, "2.26 TB")],
)
def test_format_bytes_uses_decimal_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, "unknown --dtype 'int8'"),
        ({"transport": "pigeon"}, "unknown --transport 'pigeon'"),
        ({"device": "tpu"}, "unknown --device 'tpu'"),
        ({"bucket_bytes": 10**20}, "--bucket-bytes is 100000000000000000000; it must be at most"),
        ({"num_ranks": 0}, "--ranks is 0; it must be 1 to"),
        ({"num_engines": 100_000_000}, "--engines is 100000000; it must be 1 to"),
        ({"num_ranks": 3, "trainer_tp": 2}, "3 trainer ranks cannot be cut"),
        ({"tp": 3}, "cannot be cut into tensor-parallel 3"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        show_plan(options(**changes), Console(file=StringIO()), as_json=False)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert num_elements(SHAPES[name]) == num_parameters


def write_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(QWEN3 | changes))
    return file


def test_shape_of_model_reads_the_families(tmp_path: Path) -> None:
    qwen3 = shape_of_model(write_config(tmp_path))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.tied, qwen3.head_dim) == (True, False, True, 4)
    qwen2 = shape_of_model(write_config(tmp_path, model_type="qwen2", head_dim=None))
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.head_dim) == (False, True, False, 2)
    llama = shape_of_model(write_config(tmp_path, model_type="llama", attention_bias=True, mlp_bias=True, num_key_value_heads=None))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.num_kv_heads) == (True, True, True, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "family 'mixtral'; a plan without an engine is derived for llama, mistral, qwen2, qwen3 only"),
        ({"quantization_config": {"bits": 4}}, "is quantised"),
        ({"hidden_size": 0}, "hidden_size: Input should be greater than 0"),
    ],
)
def test_shape_of_model_refuses_what_it_does_not_know(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shape_of_model(write_config(tmp_path, **changes))


def test_shape_of_model_says_when_there_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give a config.json or a folder that has one"):
        shape_of_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        shape_of_model(tmp_path)


def test_choose_shape_wants_exactly_one_way_to_say_it(tmp_path: Path) -> None:
    for model, name in ((None, None), (tmp_path, "llama-8b")):
        with pytest.raises(ConfigError, match="either --model or --shape"):
            choose_shape(model, name)
    with pytest.raises(ConfigError, match="unknown shape 'llama-9b'"):
        choose_shape(None, "llama-9b")
