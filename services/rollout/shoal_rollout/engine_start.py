"""Builds the vLLM engine of this server. Call in the main thread, before an event loop, a gRPC object or another thread exists.

On a CPU the engine core and its workers are forked, and a single worker runs inside the engine core: they inherit all imports, which saves
most of the start. vLLM's own default spawns processes that import everything again, since it cannot know that the thread count is in the
environment already.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from shoal.config.models import RunConfig
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal.vocabulary import sampled_vocab_size
from shoal_rollout.engine_seed import engine_seed
from shoal_rollout.model_facts import ModelFacts

log = get_logger(__name__)

WORKER_EXTENSION = "shoal_rollout.engine_worker.EngineWorker"


def build_engine(config: RunConfig, service_id: str) -> tuple[AsyncLLM, ModelFacts]:
    """Start the engine's processes and load the model.

    Raises: ConfigError: the model cannot be read, its context is too short, or the engine does not start.
    """
    folder = resolve_folder(config.model.path)
    hf_config = get_config(folder, config.model.trust_remote_code).get_text_config()
    facts = model_facts(folder, config, hf_config)
    if current_platform.is_cpu():
        _import_model_classes(hf_config)
    try:
        engine = _start(_engine_args(config, facts, service_id))
    except (RuntimeError, ValueError) as error:
        msg = f"the engine did not start with model {folder}: {error}; the lines above say more (is rollout.kv_cache_bytes large enough?)"
        raise ConfigError(msg) from error
    log.info("engine_started", model=folder, max_model_len=facts.max_model_len, workers=config.rollout.tensor_parallel_size)
    return engine, facts


def model_facts(folder: str, config: RunConfig, hf_config: Any) -> ModelFacts:  # noqa: ANN401 - transformers' configurations are untyped
    """Collect what requests are checked against. Raises: ConfigError: no readable tokenizer, or too short a context."""
    vocab_size = int(hf_config.vocab_size)
    num_sampled = sampled_vocab_size(folder, vocab_size)
    eos_ids = _eos_ids(Path(folder), hf_config)
    unknown = [token_id for token_id in eos_ids if not 0 <= token_id < num_sampled]
    if unknown:
        log.warning("eos_never_sampled", eos_ids=unknown, sampled_vocab_size=num_sampled, model=folder)
    return ModelFacts(
        folder=folder,
        vocab_size=vocab_size,
        sampled_vocab_size=num_sampled,
        max_model_len=_max_model_len(config, hf_config),
        # The engine masks the logits of these while a response is too short; others are outside of the logits.
        eos_ids=tuple(token_id for token_id in eos_ids if token_id not in unknown),
    )


def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if current_platform.is_cpu():
        _start_by_fork(vllm_config)
    return AsyncLLM(vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=False, log_requests=False)


def resolve_folder(path: str) -> str:
    """Find the local folder of a model path or Hugging Face id.

    Raises: ConfigError: neither a folder nor in the local cache.
    """
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} is no folder and not in the Hugging Face cache ({error}); download it first") from error


def _engine_args(config: RunConfig, facts: ModelFacts, service_id: str) -> AsyncEngineArgs:
    rollout = config.rollout
    return AsyncEngineArgs(
        model=facts.folder,
        dtype=rollout.dtype,
        max_model_len=facts.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=rollout.tensor_parallel_size,
        kv_cache_memory_bytes=rollout.kv_cache_bytes,
        seed=engine_seed(config.run.seed, service_id),
        trust_remote_code=config.model.trust_remote_code,
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
    )


def _start_by_fork(vllm_config: VllmConfig) -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if vllm_config.parallel_config.world_size == 1:
        vllm_config.parallel_config.distributed_executor_backend = "uni"


def _import_model_classes(hf_config: Any) -> None:  # noqa: ANN401 - transformers' configurations are untyped
    """Import the model's class here: vLLM would look at it in a subprocess that imports everything, the first time on a machine."""
    for architecture in getattr(hf_config, "architectures", None) or ():
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def _max_model_len(config: RunConfig, hf_config: Any) -> int:  # noqa: ANN401 - as above
    wanted = config.data.max_prompt_tokens + config.longest_answer
    context = getattr(hf_config, "max_position_embeddings", None)
    if context is None or context >= wanted:
        return wanted
    if context <= config.longest_answer:
        msg = (
            f"rollout.max_new_tokens {config.longest_answer} leaves no room for a prompt in the model's context of {context} "
            f"tokens ({config.model.path}); lower it"
        )
        raise ConfigError(msg)
    return int(context)


def _eos_ids(folder: Path, hf_config: Any) -> tuple[int, ...]:  # noqa: ANN401 - as above
    """EOS ids as generation_config.json says, else config.json: what `transformers` generation ends at."""
    path = folder / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = getattr(hf_config, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
