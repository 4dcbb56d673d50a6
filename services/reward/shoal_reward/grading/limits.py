"""The time limits of a grader."""

from __future__ import annotations

import time

from shoal.config.reward_service import RewardServiceSettings
from shoal_reward.grading.grader_process import GraderProcess
from shoal_reward.grading.progress import Phase, Progress
from shoal_reward.metrics import Cause


def excess(grader: GraderProcess, progress: Progress | None, settings: RewardServiceSettings) -> tuple[Cause, str] | None:
    """Say which limit a grader is beyond, if any: what to count it as, and what it is told as."""
    if not grader.is_ready:
        return _beyond_start(grader, settings)
    if progress is not None:
        return _beyond_call(progress, settings)
    if grader.tasks and time.monotonic() - grader.last_sign_at > settings.sample_timeout_s:
        return Cause.STUCK, f"took no task for {settings.sample_timeout_s:g} s and was killed"
    return None


def _beyond_start(grader: GraderProcess, settings: RewardServiceSettings) -> tuple[Cause, str] | None:
    if time.monotonic() - grader.started_at <= settings.prepare_timeout_s:
        return None
    return (
        Cause.PREPARE_LIMIT,
        f"had not loaded its modules at the time limit of {settings.prepare_timeout_s:g} s (prepare_timeout_s)",
    )


def _beyond_call(progress: Progress, settings: RewardServiceSettings) -> tuple[Cause, str] | None:
    if progress.phase is Phase.PREPARING:
        if progress.elapsed_s <= settings.prepare_timeout_s:
            return None
        return Cause.PREPARE_LIMIT, f"was killed at the time limit of {settings.prepare_timeout_s:g} s (prepare_timeout_s) for preparing"
    if progress.elapsed_s <= settings.sample_timeout_s:
        return None
    return Cause.TIME_LIMIT, f"was killed at the time limit of {settings.sample_timeout_s:g} s (sample_timeout_s)"
