"""A reward model in this process as a batch scorer. Only here is PyTorch imported, when the scorer is prepared."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.errors import DataError
from shoal_reward.models.batches import plan_batches
from shoal_reward.models.inputs import ModelInput
from shoal_reward.models.settings import ModelSection

if TYPE_CHECKING:
    from shoal_reward.models.loading import LoadedModel

TokenScores = float | list[float]


class RewardModel:
    """Scores batches; threads take turns at the model."""

    def __init__(self, settings: ModelSection) -> None:
        self._settings = settings
        self._loaded: LoadedModel | None = None
        self._turn = threading.Lock()

    def prepare(self) -> None:
        """Load the model, if it is not yet.

        Raises: ConfigError: it cannot be used; see `load_model`.
        """
        self._model()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, object]]
    ) -> list[TokenScores | Exception]:
        """Score samples.

        Returns: a number for each, or one for each response token; what a sample's own text, row or ids made impossible is an exception.
        """
        loaded = self._model()
        inputs = [self._read(loaded, *sample) for sample in zip(prompts, responses, rows, strict=True)]
        scores: list[TokenScores | Exception] = [DataError("not scored yet") if isinstance(read, ModelInput) else read for read in inputs]
        usable = [(place, read) for place, read in enumerate(inputs) if isinstance(read, ModelInput)]
        settings = self._settings
        lengths = [len(read.ids) for _, read in usable]
        for batch in plan_batches(lengths, max_tokens=settings.max_batch_tokens, max_samples=settings.max_batch_samples):
            given = self._forward(loaded, [usable[index][1] for index in batch])
            for index, score in zip(batch, given, strict=True):
                scores[usable[index][0]] = score
        return scores

    def _model(self) -> LoadedModel:
        with self._turn:
            if self._loaded is None:
                from shoal_reward.models.loading import load_model

                self._loaded = load_model(self._settings)
            return self._loaded

    def _read(self, loaded: LoadedModel, prompt: str, response: str, row: Mapping[str, object]) -> ModelInput | Exception:
        try:
            return loaded.reader.read(prompt, response, row)
        except Exception as error:  # noqa: BLE001 - whatever one sample makes of the template or tokenizer is an error of this sample only
            return error

    def _forward(self, loaded: LoadedModel, samples: Sequence[ModelInput]) -> list[TokenScores]:
        scale, shift = self._settings.scale, self._settings.shift
        # One pass at a time: two together would take the memory of both and be no faster.
        with self._turn:
            if not self._settings.per_token:
                return [scale * value + shift for value in loaded.forward.pooled(samples)[:, loaded.label].tolist()]
            outputs = loaded.forward.of_tokens(samples)[:, :, loaded.label].tolist()
        return [
            [scale * value + shift for value in row[len(sample.ids) - sample.num_response : len(sample.ids)]]
            for sample, row in zip(samples, outputs, strict=True)
        ]
