"""What the loop does for the algorithms: KL coefficients, critic warm-up, evaluations and their records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from shoal_coordinator.rest import create_app
from shoal_coordinator.rest_models import Command
from shoal_coordinator.states import RunState

from shoal.config.algorithm import AlgorithmSection
from tests.helpers.run_fakes import RunHarness, ScriptedConnector

S = RunState


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def train(folder: Path, **sections: Any) -> RunHarness:  # noqa: ANN401
    async with RunHarness(folder, **sections) as run:
        run.join_all()
        await run.until(S.FINISHED)
    return run


async def train_up_to(step: int, folder: Path, connector: ScriptedConnector) -> RunHarness:
    """A run of many steps with two of warm-up that is stopped after one of them."""
    async with RunHarness(folder, connector=connector, run={"steps": 9}, algorithm={"estimator": "gae", "critic_warmup_steps": 2}) as run:
        run.workload.hold_at = step
        run.join_all()
        await run.workload.holding.wait()
        run.coordinator.backend.command(Command.STOP)
        run.workload.release.set()
        await run.until(S.STOPPED)
    return run


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kl_in": "none"}, (0.0, 0.0)),
        ({"kl_in": "reward", "kl_coef": 0.2}, (0.2, 0.0)),
        ({"kl_in": "loss", "kl_loss_coef": 0.3}, (0.0, 0.3)),
        ({"kl_in": "both", "kl_coef": 0.2, "kl_loss_coef": 0.3}, (0.2, 0.3)),
    ],
)
async def test_run_passes_each_kl_coefficient_and_writes_both_down(
    tmp_path: Path, settings: dict[str, Any], expected: tuple[float, float]
) -> None:
    """R68."""
    run = await train(tmp_path, run={"steps": 1}, algorithm={"estimator": "gae"} | settings)
    assert run.connector.actor.kl_coefs == [expected]
    (metrics,) = read_lines(tmp_path / "metrics.jsonl")
    assert (metrics["kl_coef"], metrics["kl_loss_coef"]) == expected


async def test_run_adapts_the_kl_coefficient_after_every_step(tmp_path: Path) -> None:
    algorithm = {"estimator": "gae", "kl_coef": 0.1, "kl_controller": "adaptive", "kl_target": 2.0, "kl_horizon": 100}
    run = await train(tmp_path, run={"steps": 3}, algorithm=algorithm)
    # A KL of 1 per response is half the target: 20 % x 4 samples / 100 less each step.
    expected = [0.1 * 0.992**step for step in range(3)]
    assert [kl_coef for kl_coef, _ in run.connector.actor.kl_coefs] == pytest.approx(expected)
    assert [step["kl_coef"] for step in read_lines(tmp_path / "metrics.jsonl")] == pytest.approx(expected)
    assert read_lines(tmp_path / "metrics.jsonl")[0]["kl_per_response"] == 1.0


async def test_run_trains_the_critic_alone_in_its_warm_up(tmp_path: Path) -> None:
    run = await train(tmp_path, run={"steps": 4}, algorithm={"estimator": "gae", "critic_warmup_steps": 2})
    updates = [entry for entry in run.log if "update" in entry]
    assert updates[:2] == ["critic update 1", "critic update 2"]
    assert sorted(updates[2:]) == ["actor update 3", "actor update 4", "critic update 3", "critic update 4"]
    assert [entry for entry in run.log if entry.startswith("collect")] == [
        f"collect {step} at version {version}" for step, version in ((1, 0), (2, 0), (3, 0), (4, 1))
    ]
    assert run.workload.queue.acked == [f"s{step}-g{index}" for step in range(1, 5) for index in (0, 1)]
    assert run.connector.sinks["rollout-0:1"].calls.count("commit") == 2
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [(step["critic_warmup"], step["policy_version"]) for step in metrics] == [(1.0, 0), (1.0, 0), (0.0, 1), (0.0, 2)]
    assert ["actor_update_applied" in step for step in metrics] == [False, False, True, True]
    assert metrics[0]["push_pause_ms"] == 0.0
    step = [S.ROLLING_OUT, S.TRAINING]
    assert run.states == [S.WAITING_FOR_SERVICES, *step, *step, *step, S.PUSHING, *step, S.PUSHING, S.FINISHING, S.FINISHED]


async def test_run_continues_within_and_behind_a_warm_up(tmp_path: Path) -> None:
    connector = ScriptedConnector()
    for steps, versions in ((1, (0, 1)), (2, (0, 2)), (3, (1, 3)), (4, (2, 4))):
        again = await train_up_to(steps, tmp_path, connector)
        assert (connector.actor.step, connector.critic.step) == versions
        assert again.coordinator.run.progress.step == steps
    assert [step["critic_warmup"] for step in read_lines(tmp_path / "metrics.jsonl")] == [1.0, 1.0, 0.0, 0.0]


async def test_run_leaves_the_kl_coefficient_alone_while_the_policy_stands_still(tmp_path: Path) -> None:
    algorithm = {"estimator": "gae", "critic_warmup_steps": 2, "kl_coef": 0.1, "kl_controller": "adaptive", "kl_target": 2.0}
    run = await train(tmp_path, run={"steps": 4}, algorithm=algorithm)
    coefficients = [kl_coef for kl_coef, _ in run.connector.actor.kl_coefs]
    assert coefficients[:3] == [0.1] * 3
    assert coefficients[3] < 0.1


async def test_run_splits_a_short_batch_into_fewer_mini_batches(tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 4, "group_size": 2}
    run = await train(tmp_path, run={"steps": 1}, rollout=rollout, algorithm={"estimator": "gae", "mini_batches": 8})
    # The made-up step has four samples.
    assert [len(rank) for batch in run.connector.actor.batches for rank in batch.ranks] == [4]


async def test_run_without_a_critic_has_no_metric_of_its_warm_up(tmp_path: Path) -> None:
    await train(tmp_path, estimator="grpo", run={"steps": 1})
    assert "critic_warmup" not in read_lines(tmp_path / "metrics.jsonl")[0]


async def test_run_writes_every_evaluation_beside_the_policy_version(tmp_path: Path) -> None:
    run = await train(tmp_path, held_out=True, run={"steps": 2}, evaluation={"every": 1})
    lines = read_lines(tmp_path / "evaluations.jsonl")
    assert [(line["step"], line["policy_version"], line["accuracy"]) for line in lines] == [(0, 0, 0.0), (1, 1, 0.1), (2, 2, 0.2)]
    assert all(line["timestamp_unix_s"] > 0 and line["num_samples"] == line["num"] == 10 for line in lines)
    assert [line["policy_versions"] for line in lines] == [[0], [1], [2]]
    assert json.loads((tmp_path / "report.json").read_text())["evaluations"] == lines
    shown = run.coordinator.backend.status().evaluations
    assert [evaluation.model_dump() for evaluation in shown] == lines


async def test_report_holds_the_resolved_configuration(tmp_path: Path) -> None:
    """R05: the estimator and the population of its statistics are on record."""
    await train(tmp_path, estimator="grpo", run={"steps": 1}, redis={"url": "redis://user:secret@queue:6379/0"})
    text = (tmp_path / "report.json").read_text()
    config = json.loads(text)["config"]
    assert (config["algorithm"]["estimator"], config["algorithm"]["group_std"], config["algorithm"]["group_baseline"]) == (
        "grpo",
        "sample",
        "mean",
    )
    assert (config["algorithm"]["whiten_advantages"], config["reward"]["normalise"]) == (False, "none")
    assert config["algorithm"].keys() == set(AlgorithmSection.model_fields)
    assert config["redis"]["url"] == "redis://user:***@queue:6379/0"
    assert "secret" not in text


def strict(text: str) -> Any:  # noqa: ANN401
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def test_replies_and_files_are_strict_json_whatever_the_services_report(tmp_path: Path) -> None:
    """R36."""
    async with RunHarness(tmp_path, held_out=True, run={"steps": 2}, push={"audit_every": 1}) as run:
        run.connector.actor.kl_per_response = math.inf
        run.connector.rollout("rollout-0:1").logprob = math.nan
        run.workload.mean_reward = math.nan
        run.join_all()
        await run.until(S.FINISHED)
        transport = httpx.ASGITransport(app=create_app(run.coordinator.backend, run.coordinator.reward_backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
            paths = ("/v1/status", "/v1/steps", "/v1/pushes", "/v1/audits", "/v1/services")
            replies = {path: strict((await client.get(path)).raise_for_status().text) for path in paths}
    assert replies["/v1/steps"]["steps"][0]["kl_per_response"] is None
    assert replies["/v1/audits"]["audits"][0]["servers"][0]["probe"]["max_logprob_difference"] is None
    assert replies["/v1/status"]["evaluations"][0]["mean_reward"] is None
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert all(strict(line) for line in (tmp_path / name).read_text().splitlines())
    assert strict((tmp_path / "report.json").read_text())["state"] == "finished"
