"""Kind `judge`: a language model behind an OpenAI-compatible endpoint grades each response by a rubric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import CodecError, DataError
from shoal.reward import Isolation
from shoal_reward.judge.answers import read_object, read_score_line
from shoal_reward.judge.rubric import FENCE_RULE, Rubric
from shoal_reward.judge.settings import JudgeSection
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.remote.endpoint import JsonEndpoint

_PATH = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Judge:
    """Asks for one grade at a time; many may be under way."""

    settings: JudgeSection
    endpoint: JsonEndpoint
    rubric: Rubric

    async def score(self, prompt: str, response: str, row: Mapping[str, object]) -> float | dict[str, float]:
        """Grade a response.

        Returns: the number of the line, or those of the object, times their weights.
        Raises:
            DataError: the row lacks a column, a text is too long, or the answer is not of the asked form.
            ShoalError: see `JsonEndpoint.post`.
        """
        # Before the rest, which would hold up the event loop for an answer of many megabytes.
        self._check_length(len(prompt) + len(response))
        text = self.rubric.render(prompt, response, row)
        self._check_length(len(text))
        answer = _content(await self.endpoint.post(_PATH, self.request(text)))
        if self.settings.answer == "line":
            return self.settings.score.weight * read_score_line(answer, self.settings.score, (prompt, response))
        numbers = read_object(answer, self.settings.fields, (prompt, response))
        return {name: self.settings.fields[name].weight * number for name, number in numbers.items()}

    def _check_length(self, num_chars: int) -> None:
        if num_chars > self.settings.max_text_chars:
            raise DataError(f"the judge would read {num_chars} characters, max_text_chars allows {self.settings.max_text_chars}")

    def request(self, text: str) -> dict[str, object]:
        """The body for a rendered rubric."""
        settings = self.settings
        rules = f"{FENCE_RULE}\n{_asked_form(settings)}"
        messages = (
            [{"role": "system", "content": rules}, {"role": "user", "content": text}]
            if settings.system_role
            else [{"role": "user", "content": f"{text}\n\n{rules}"}]
        )
        body: dict[str, object] = {"model": settings.model, "messages": messages, settings.max_tokens_name: settings.max_tokens}
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return body | settings.extra


def _asked_form(settings: JudgeSection) -> str:
    if settings.answer == "line":
        low, high = settings.score.low, settings.score.high
        return f"End your answer with one line of the form `Score: x`, where x is a number from {low:g} to {high:g}."
    fields = "; ".join(f'"{name}", a number from {field.low:g} to {field.high:g}' for name, field in settings.fields.items())
    return f"Answer with one JSON object and nothing else. Its members: {fields}."


def _content(answer: Mapping[str, Any]) -> str:
    """The one complete text of a chat completion."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise CodecError("the judge's server answered 200 without exactly one choice")
    if (reason := choices[0].get("finish_reason")) not in ("stop", None):
        raise DataError(f"the judge's answer is not complete (finish_reason {reason!r}): raise max_tokens or shorten what it reads")
    message = choices[0].get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str) or not content.strip():
        raise DataError("the judge's server answered 200 without text")
    return content


def _build(settings: JudgeSection) -> BuiltScorer:
    judge = Judge(settings, JsonEndpoint(settings), Rubric(settings.rubric))
    return BuiltScorer(function=judge.score, isolation=Isolation.LOOP)


KIND = ScorerKind(description="grade of a language model by a rubric", settings=JudgeSection, build=_build)
