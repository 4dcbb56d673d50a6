"""Kind `model_server`: a reward model on a vLLM server that was started with `--runner pooling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import CodecError, DataError
from shoal.reward import Isolation
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.models.chat import check_length, messages_of
from shoal_reward.models.settings import ModelServerSection
from shoal_reward.remote.endpoint import JsonEndpoint

_CLASSIFY, _POOLING = "/classify", "/pooling"


@dataclass(frozen=True, slots=True)
class ModelServer:
    """Asks for one score at a time; the server puts those under way into batches."""

    settings: ModelServerSection
    endpoint: JsonEndpoint

    async def score(self, prompt: str, response: str, row: Mapping[str, object]) -> float | list[float]:
        """Score a response.

        Returns: scale x output + shift, or one for each response token.
        Raises:
            DataError: the sample cannot be put into a request.
            CodecError: the answer lacks an output that was asked for. ShoalError: see `JsonEndpoint.post`.
        """
        scale, shift = self.settings.scale, self.settings.shift
        if self.settings.per_token:
            return [scale * value + shift for value in await self._of_tokens(row)]
        check_length(prompt, response, self.settings.max_text_chars)
        answer = await self.endpoint.post(_CLASSIFY, self.request(prompt, response, row))
        return scale * self._chosen(_only_entry(answer).get("probs")) + shift

    def request(self, prompt: str, response: str, row: Mapping[str, object]) -> dict[str, object]:
        """The body for one sample; without activation, that is the raw output."""
        settings = self.settings
        body: dict[str, object] = {"model": settings.model, "use_activation": False}
        if settings.input == "chat":
            body["messages"] = messages_of(prompt, response, row, settings.messages_key)
        else:
            body["input"] = f"{prompt}{settings.separator}{response}"
        if settings.max_tokens is not None:
            body |= {"truncate_prompt_tokens": settings.max_tokens, "truncation_side": "left"}
        return body

    async def _of_tokens(self, row: Mapping[str, object]) -> list[float]:
        prompt_ids, response_ids = _ids(row, "prompt_ids"), _ids(row, "response_ids")
        if not response_ids:
            raise DataError("the response has no token: nothing can be scored")
        ids = [*prompt_ids, *response_ids]
        body = {"model": self.settings.model, "use_activation": False, "task": "token_classify", "input": ids, "add_special_tokens": False}
        outputs = _only_entry(await self.endpoint.post(_POOLING, body)).get("data")
        if not isinstance(outputs, list) or len(outputs) != len(ids):
            raise CodecError(f"the server gave {len(outputs) if isinstance(outputs, list) else 'no'} token outputs for {len(ids)} tokens")
        return [self._chosen(output) for output in outputs[len(prompt_ids) :]]

    def _chosen(self, outputs: object) -> float:
        if not isinstance(outputs, list) or not all(isinstance(value, (int, float)) for value in outputs) or not outputs:
            raise CodecError("the server answered 200 without the model's outputs")
        place = self.settings.label
        if place is None and len(outputs) > 1:
            raise CodecError(f"the model has {len(outputs)} outputs: set label to the place of one")
        if place is None:
            place = 0
        if not isinstance(place, int) or not 0 <= place < len(outputs):
            raise CodecError(f"the model has {len(outputs)} outputs, label is {place!r}: set it to the place of one")
        return float(outputs[place])


def _only_entry(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    entries = answer.get("data")
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
        raise CodecError("the server answered 200 without exactly one entry in data")
    return entries[0]


def _ids(row: Mapping[str, object], name: str) -> list[int]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise DataError(f"the row has no {name}: send token ids to scorers whose description asks for them")
    return ids


def _build(settings: ModelServerSection) -> BuiltScorer:
    server = ModelServer(settings, JsonEndpoint(settings))
    return BuiltScorer(function=server.score, isolation=Isolation.LOOP, needs_token_ids=settings.per_token)


KIND = ScorerKind(description="output of a reward model on a vLLM server", settings=ModelServerSection, build=_build)
