"""A real engine in the test's process, and its model as a push sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from tests.helpers.inprocess_engine import InProcessEngine
from tests.helpers.staged_copies import swap

if TYPE_CHECKING:
    from shoal_rollout.engine_model import EngineModel

PROMPT = [5, 6, 7, 90, 100]

Greedy = tuple[list[int], list[float]]
"""Ids and log-probabilities of a greedy response to the prompt."""


class EngineRig:
    """Starts an engine on a folder. Raises: ConfigError: its weights cannot be pushed."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from shoal_rollout.engine_model import EngineModel

        self.engine = InProcessEngine(folder, dtype=dtype, extension="")
        try:
            self.model: EngineModel = EngineModel(self.engine.model, folder, self.engine.worker.vllm_config)
        except BaseException:
            self.engine.close()
            raise

    def greedy(self) -> Greedy:
        """Answer the prompt greedily."""
        return _greedy(self.engine)

    def swap(self, staged: Mapping[str, Tensor], changed: Collection[str] | None = None) -> None:
        """Exchange the named parameters, all by default, and forget cached keys and values."""
        swap(self.model, staged, changed)
        assert self.engine.llm.reset_prefix_cache()


def fresh_greedy(folder: Path, dtype: str = "float32") -> Greedy:
    """What an engine that was started on the folder answers."""
    engine = InProcessEngine(folder, dtype=dtype, extension="")
    try:
        return _greedy(engine)
    finally:
        engine.close()


def _greedy(engine: InProcessEngine) -> Greedy:
    ids, logprobs, _ = engine.sample(PROMPT, temperature=0.0)
    return ids, logprobs.tolist()
