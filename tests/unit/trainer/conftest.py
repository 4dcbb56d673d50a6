"""A gang of one for tests that compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shoal_trainer.distributed import RankContext

from tests.helpers.trainer_bench import one_rank, run_config, save_policy


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied two-layer model."""
    return save_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def context(policy_folder: Path) -> Iterator[RankContext]:
    """The context of a gang of one."""
    torch.set_num_threads(1)
    with one_rank(run_config(policy_folder)) as rank_context:
        yield rank_context
