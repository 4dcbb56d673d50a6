"""Scorers that ship with the reward service, and the verifiers under the names of their kinds, with default settings.

Importing this is quick: what a verifier needs is imported when a grader gets ready for it.
"""

from __future__ import annotations

from shoal.config.reward_service import ScorerDefinition
from shoal.reward import REGISTRY, Row, reward
from shoal_reward.kinds import build_scorer
from shoal_reward.verifiers.extraction import Rule, find_answer
from shoal_reward.verifiers.gold import column_text

VERIFIERS = ("choice", "format", "json_schema", "length", "math", "reasoning_gym", "regex")
"""Kinds that are scorers of the same name too."""


@reward(name="arithmetic", version="1")
def arithmetic(prompt: str, response: str, row: Row) -> float:
    """1 if the response, or what its last box holds, is the row's `answer` (surrounding blanks aside), else 0."""
    answer = column_text(row, "answer")
    return 1.0 if response.strip() == answer.strip() or _boxed(response) == answer.strip() != "" else 0.0


@reward(name="exact", version="1")
def exact(prompt: str, response: str, row: Row) -> float:
    """1 if the response, or what its last box holds, equals the row's `answer` character by character, else 0."""
    answer = column_text(row, "answer")
    return 1.0 if response == answer or _boxed(response) == answer != "" else 0.0


def _boxed(response: str) -> str:
    return find_answer(response, (Rule.BOX,))


for _name in VERIFIERS:
    REGISTRY.add(build_scorer(_name, ScorerDefinition(kind=_name)))

# Trying a sandbox takes a process, which an import must not start.
REGISTRY.add(build_scorer("code", ScorerDefinition(kind="code", settings={"check_at_start": False})))

reasoning_gym = REGISTRY.get("reasoning_gym").function
"""The scorer of that name, for those who call it without a service."""
