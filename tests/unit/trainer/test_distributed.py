"""Joining a gang and agreeing on failures."""

from __future__ import annotations

import pytest
import torch
from shoal_trainer.distributed import RankContext, join_gang

from shoal.config.gang import GangSection
from shoal.errors import ConfigError, StateError


def test_join_gang_without_torchrun_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK.*torch\.distributed\.run"):
        join_gang(GangSection())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_join_gang_on_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="no GPU"):
        join_gang(GangSection(device="cuda"))


def test_agreed_passes_a_ranks_own_failure_on(context: RankContext) -> None:
    with pytest.raises(StateError, match="mine"), context.agreed():
        raise StateError("mine")


def test_reductions_of_one_rank_are_the_values_themselves(context: RankContext) -> None:
    local = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert torch.equal(context.sum_over_ranks(local), local)
    assert torch.equal(context.max_over_ranks(local), local)
