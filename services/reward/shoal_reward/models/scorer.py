"""Kind `model`: a Hugging Face model with a classification head, on the CPU or a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shoal.errors import ConfigError
from shoal.reward import Isolation
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.models.files import check_folder, digest_folder, label_place
from shoal_reward.models.reward_model import RewardModel
from shoal_reward.models.settings import ModelSection

_LIBRARIES = ("torch", "transformers", "safetensors")


def _build(settings: ModelSection) -> BuiltScorer:
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"kind model needs {', '.join(missing)}: install shoal-rl[reward-model]")
    folder, content = Path(settings.model), ""
    if folder.is_dir():
        label_place(check_folder(folder), settings.label)
        content = digest_folder(folder)
    elif folder.is_absolute() or settings.model.startswith("."):
        raise ConfigError(f"model {settings.model!r} is no folder: name the folder of a Hugging Face model, or the id of a cached one")
    model = RewardModel(settings)
    return BuiltScorer(
        function=model.score,
        is_batch=True,
        # A process for each would hold the model as many times.
        isolation=Isolation.THREAD,
        prepare=model.prepare,
        needs_token_ids=settings.per_token,
        content=content,
    )


KIND = ScorerKind(description="output of a Hugging Face reward model", settings=ModelSection, build=_build)
