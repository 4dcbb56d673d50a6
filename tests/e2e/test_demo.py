"""`shoal demo` trains through all services, and what it reports is true."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.local.process_tree import descendants
from tests.helpers.demo import Demo, port_is_open, started_demo, tiny_demo
from tests.helpers.processes import alive
from tests.helpers.valkey import running_valkey

pytestmark = pytest.mark.timeout(420)

NUM_STEPS = 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Demo, list[dict[str, Any]], dict[str, Any]]]:
    """A short run of the arithmetic preset, its steps and its report."""
    with started_demo(tmp_path_factory.mktemp("demo"), "--seed", "0", "--steps", str(NUM_STEPS)) as demo:
        demo.wait_for_step(1, 300)
        pids, address = descendants(demo.process.pid), demo.rest_address()
        assert demo.process.wait(300) == 0, demo.log()
        assert alive(pids) == []
        assert not port_is_open(address)
        folder = demo.run_folder()
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        yield demo, steps, json.loads((folder / "report.json").read_text())


Finished = tuple[Demo, list[dict[str, Any]], dict[str, Any]]


def test_demo_advances_one_version_a_step(finished: Finished) -> None:
    _, steps, report = finished
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert [step["policy_version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert [step["rollout_policy_version"] for step in steps] == list(range(NUM_STEPS))
    assert (report["state"], report["steps"], report["policy_version"]) == ("finished", NUM_STEPS, NUM_STEPS)


def test_demo_trains_on_the_sampled_ids(finished: Finished) -> None:
    """The trainer's log-probabilities of what it trained on are the engine's of what it sampled, after every push."""
    _, steps, _ = finished
    assert max(step["logprob_max_difference"] for step in steps) <= 1e-4
    assert max(step["ratio_max_deviation"] for step in steps) <= 1e-5
    assert all(step["num_samples"] == 256 and step["unscored_share"] == 0 for step in steps)


def test_demo_reward_rises(finished: Finished) -> None:
    _, steps, _ = finished
    rewards = [step["reward"] for step in steps]
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.03


def test_demo_leaves_no_shared_memory(finished: Finished) -> None:
    assert finished[0].shared_memory() == []


def test_demo_draws_curves_and_prints_the_report(finished: Finished) -> None:
    demo, _, report = finished
    png = (demo.run_folder() / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    text = demo.output.read_text()
    assert f"{report['accuracy_before']:.1%} before, {report['accuracy_after']:.1%} after" in text
    assert str(demo.run_folder() / "report.json") in text


def test_demo_export_has_the_reported_accuracy(finished: Finished) -> None:
    demo, _, report = finished
    assert _greedy_accuracy(demo.run_folder()) == pytest.approx(report["accuracy_after"], abs=0.004)


def _greedy_accuracy(run: Path) -> float:
    """Share of held-out rows that a plain transformers generation of the export answers exactly."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = yaml.safe_load((run / "config.yaml").read_text())
    rows = [json.loads(line) for line in Path(config["data"]["held_out"]).read_text().splitlines()]
    rows = rows[: config["evaluation"]["max_prompts"]]
    tokenizer = AutoTokenizer.from_pretrained(run / "export", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=8)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    num_correct: int = sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True))
    return num_correct / len(rows)


@pytest.mark.slow
def test_demo_with_two_actor_ranks_and_the_users_redis(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "redis") as server:
        own = ("--actor-ranks", "2", "--redis", server.url, "--steps", "3", "--set", "rollout.max_new_tokens=4")
        with tiny_demo(tmp_path, *own) as demo:
            assert demo.process.wait(240) == 0, demo.log()
        steps = [json.loads(line) for line in (demo.run_folder() / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2, 3]
    assert max(step["logprob_max_difference"] for step in steps) <= 1e-4
