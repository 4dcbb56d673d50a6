"""The answer equals the row's, as text."""

from __future__ import annotations

from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import find_answer
from shoal_reward.verifiers.gold import AnswerSettings, gold_answers, shared_code


class ExactSettings(AnswerSettings):
    """How texts are compared."""

    ignore_case: bool = False
    """Whether Paris is paris."""
    collapse_blanks: bool = True
    """Whether a run of blanks and line ends is one blank."""


def build(settings: ExactSettings) -> BuiltScorer:
    """Make a scorer that compares texts."""

    def normal(text: str) -> str:
        text = " ".join(text.split()) if settings.collapse_blanks else text
        return text.casefold() if settings.ignore_case else text

    def score(prompt: str, response: str, row: Row) -> dict[str, float] | None:
        golds = gold_answers(row, settings)
        if not golds:
            return None
        return {"correct": float(normal(find_answer(response, settings.extract)) in [normal(gold) for gold in golds])}

    return BuiltScorer(function=score, content=shared_code())


KIND = ScorerKind(description="1 if the answer is the row's, as text, else 0.", settings=ExactSettings, build=build)
