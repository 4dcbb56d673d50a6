"""A coordinator process that trains on, and evaluates with, the splits of a saved data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.coordinator_process import VOCABULARY, running_coordinator, write_config
from tests.helpers.fake_services import FakeCluster
from tests.helpers.valkey import running_valkey

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_valkey(tmp_path / "redis") as server:
        yield server.url


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two splits of sums; question and answer have columns of other names."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"question": f"{index}+{index}=", "solution": str(2 * index)} for index in range(9)])
    splits = datasets.DatasetDict({"train": rows.select(range(6)), "test": rows.select(range(6, 9))})
    splits.save_to_disk(tmp_path / "data")
    return tmp_path / "data"


async def test_coordinator_trains_on_one_split_and_evaluates_another_with_its_own_sampling(
    tmp_path: Path, redis_url: str, data: Path
) -> None:
    columns = {"prompt_key": "question", "answer_key": "solution"}
    config = write_config(
        tmp_path,
        redis_url,
        run={"steps": 2},
        data={"train": str(data), "train_split": "train", "held_out": str(data), "held_out_split": "test", **columns},
        evaluation={"samples": 2, "temperature": 0.5},
    )
    async with running_coordinator(config, "--exit-when-done") as coordinator:
        async with FakeCluster(coordinator.grpc_address, "test", vocab_size=len(VOCABULARY)) as cluster:
            assert await coordinator.wait() == 0
        # Three rows before the first step and after the last, one call each; four groups a step.
        assert cluster.rollout.generated_at == [0] * 3 + [0] * 4 + [1] * 4 + [2] * 3
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [evaluation["policy_version"] for evaluation in report["evaluations"]] == [0, 2]
    assert all(evaluation["num_samples"] == 6 for evaluation in report["evaluations"])
