"""A vLLM engine inside the test's process: starts in about two seconds, and its worker can be looked into."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from shoal.types import Completion, InflightMode, SamplingParams

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_PLUGINS": "",
}
"""Set these (monkeypatch) before an `InProcessEngine` is made and while it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sample that is asked for."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None


class InProcessEngine:
    """`SwappableEngine` over vLLM's synchronous engine, plus sampling with log-probabilities."""

    def __init__(
        self, folder: Path, *, dtype: str = "float32", extension: str = "shoal_rollout.engine_worker.EngineWorker", **arguments: object
    ) -> None:
        from vllm import LLM

        # vLLM collects garbage nine times between start and end; what the process holds already (a million objects) stays left out.
        gc.freeze()
        self._collector = patch.multiple(gc, freeze=_nothing, unfreeze=_nothing)
        self._collector.start()
        self.llm: Any = LLM(
            model=str(folder),
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=16 << 20,
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            worker_extension_cls=extension,
            **arguments,
        )

    @property
    def worker(self) -> Any:  # noqa: ANN401 - vLLM is not type-checked here
        """The only worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def model(self) -> Any:  # noqa: ANN401 - as above
        """The worker's model."""
        return self.worker.model_runner.get_model()

    async def call_workers(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401 - plain data of any shape
        """Call a worker method; errors as the real engine raises them."""
        from shoal_rollout.engine import worker_values

        return worker_values(self.llm.collective_rpc(method, args=args))

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """Nothing runs between synchronous calls."""
        return 0

    async def finish_swap(self, version: str) -> None:
        """Drop cached keys and values and tag the version."""
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.set_weight_version(version)

    async def resume(self) -> None:
        """Nothing was paused."""

    def sample(
        self, prompt_ids: Sequence[int], *, seed: int = 0, num_tokens: int = 16, temperature: float = 1.0
    ) -> tuple[list[int], NDArray[np.float32], list[str]]:
        """Sample one response; returns its ids, log-probabilities and the weight versions seen."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            seed=seed,
            temperature=temperature,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        (output,) = self.llm.generate([{"prompt_token_ids": list(prompt_ids)}], params, use_tqdm=False)
        completion = output.outputs[0]
        versions = [span.version for span in completion.weight_versions]
        return list(completion.token_ids), np.array(completion.logprobs.logprobs, dtype=np.float32), versions

    def complete(self, requests: Sequence[Ask], eos_ids: tuple[int, ...] = ()) -> list[Completion]:
        """Answer requests as a server does that was asked for one sample each."""
        from shoal_rollout.completions import to_completion
        from shoal_rollout.generation import stop_ids_of
        from shoal_rollout.vllm_engine import VllmEngine, engine_sample

        engine = VllmEngine(self.llm)
        params = [engine.make_params(ask.sampling, stop_ids_of(ask.sampling, eos_ids), ask.seed) for ask in requests]
        self.llm.llm_engine.set_weight_version("0")
        outputs = self.llm.generate([{"prompt_token_ids": ask.prompt_ids} for ask in requests], params, use_tqdm=False)
        return [
            to_completion(engine_sample(output), sample_index=index, latency_ms=0.0, engine_id="engine")
            for index, output in enumerate(outputs)
        ]

    def close(self) -> None:
        """Free the engine, so that another one can start in this process; a second call does nothing."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if not hasattr(self, "llm"):
            return
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()
        self._collector.stop()
        gc.unfreeze()


def _nothing() -> None:
    """Stand in for a function that is not wanted."""
