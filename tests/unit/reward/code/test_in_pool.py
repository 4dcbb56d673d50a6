"""The scorer of code in the service's own graders, which are killed at a limit of theirs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from shoal_reward.grading.pool import GraderPool
from shoal_reward.kinds import build_scorer

from shoal.codec.reward import score_result_from_proto, score_sample_to_proto
from shoal.config.reward_service import RewardServiceSettings, ScorerDefinition
from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.code_answers import PATIENT

DEFINITION = ScorerDefinition(kind="code", settings={"place": "whole", "limits": json.loads(PATIENT.model_dump_json())})
TESTS = ["assert f() == 1"]
ENDLESS = "while True: pass"


async def scored(answers: list[tuple[str, object]], sample_timeout_s: float) -> list[ScoreResult]:
    """Score answers to tests by a pool of one grader."""
    settings = RewardServiceSettings(modules=(), scorers={"code": DEFINITION}, workers=1, sample_timeout_s=sample_timeout_s)
    scorer = build_scorer("code", DEFINITION)
    pool = GraderPool(settings, [scorer])
    await pool.start()
    try:
        samples = [
            ScoreSample(
                sample_id=str(number),
                prompt="",
                response=answer,
                row={"tests": tests},
                num_response_tokens=1,
                finish_reason=FinishReason.STOP,
            )
            for number, (answer, tests) in enumerate(answers)
        ]
        results = await pool.score(scorer, [score_sample_to_proto(sample) for sample in samples], 100.0)
        return [score_result_from_proto(result) for result in results]
    finally:
        await pool.stop()


async def test_scores_zeros_and_errors_are_told_apart() -> None:
    answers: list[tuple[str, object]] = [("def f(): return 1", TESTS), ("def f(): return 2", TESTS), ("x =", TESTS)]
    answers += [("import os\nos._exit(0)", TESTS), ("def f(): return 1", [1])]
    results = await scored(answers, 60.0)
    assert [(result.status, result.value) for result in results[:4]] == [(ScoreStatus.SCORED, value) for value in (1.0, 0.0, 0.0, 0.0)]
    assert results[4].status is ScoreStatus.ERROR
    assert "tests[0]" in results[4].message


async def test_a_grader_that_is_killed_takes_its_sandbox_with_it() -> None:
    (result,) = await scored([(ENDLESS, TESTS)], 1.5)
    assert result.status is ScoreStatus.ERROR
    assert "sample_timeout_s" in result.message
    wait_for_no_orphans(time.monotonic() + 30)
    assert orphans() == []


def wait_for_no_orphans(deadline: float) -> None:
    """The kernel kills them right after the grader; it cannot be asked to tell when."""
    while orphans() and time.monotonic() < deadline:
        time.sleep(0.01)


def orphans() -> list[int]:
    """Sandboxed processes that run although their starter does not."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        is_sandbox = len(arguments) > 1 and arguments[-2].endswith(b"code/inside/boot.py")
        if is_sandbox and not Path(f"/proc/{json.loads(arguments[-1])['parent']}").exists():
            found.append(int(process.name))
    return found
