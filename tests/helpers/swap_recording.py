"""Parts of a run that write down what they see while the reward is swapped."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_coordinator.rewards.audit_log import LogEntry
from shoal_coordinator.rewards.calls import ScorerCalls, ServiceResult
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.server_pool import ServerPool

from shoal.types import Completion, SamplingParams, ScoreResult, ScoreSample
from tests.helpers.coordinator_fakes import FakeRollout


class SlowRollout(FakeRollout):
    """Answers after a moment of chance."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(policy_version=1 << 30)
        self._rng = rng

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        """See the class."""
        await asyncio.sleep(self._rng.random() * 0.006)
        async for completion in super().generate(
            request_id, prompt_ids, sampling, num_samples, seeds, min_policy_version, timeout_s=timeout_s
        ):
            yield completion


class RecordingCalls(ScorerCalls):
    """The real calls; asked: (is_live, scorer, version, sample id) -> how often."""

    def __init__(self, asked: Counter[tuple[bool, str, str, str]], pool: ServerPool[RewardEndpoint], **settings: Any) -> None:  # noqa: ANN401
        super().__init__(pool, **settings)
        self._asked = asked
        self._side = not settings.get("is_live", True)

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        """Note and ask."""
        self._note(component, samples)
        return await super().score(component, samples, num_groups)

    async def score_groups(self, component: RouteComponent, groups: Sequence[Sequence[ScoreSample]]) -> list[list[ServiceResult]]:
        """Note and ask."""
        for samples in groups:
            self._note(component, samples)
        return await super().score_groups(component, groups)

    def _note(self, component: RouteComponent, samples: Sequence[ScoreSample]) -> None:
        self._asked.update((not self._side, component.scorer, component.version, sample.sample_id) for sample in samples)


class DurableLog:
    """What of the audit log is on disk: the active revision after each of its lines that was synced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fsync = os.fsync
        self.active = [0]

    def fsync(self, file: int) -> None:
        """In place of os.fsync."""
        self._fsync(file)
        if self._path.exists() and os.fstat(file).st_ino == self._path.stat().st_ino:
            lines = self._path.read_bytes()[: os.fstat(file).st_size].splitlines()
            self.active += [LogEntry.model_validate_json(line).active for line in lines[len(self.active) - 1 :]]


@dataclass
class Issued:
    """A group, or an evaluation: the revision that was active when it was issued."""

    revision: int
    source: str = ""
    is_done: bool = False
