"""A model as one tensor-parallel worker loads it, without the other workers.

vLLM's layers and weight loaders learn the number of workers and their own rank from the tensor-parallel group, once, when they are
made; loading exchanges nothing. So a model that is built while the group claims another size and rank loads what that worker would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def simulated_ranks(folder: Path, num_workers: int, scratch: Path) -> Iterator[list[nn.Module]]:
    """Build the folder's model for every worker of `num_workers` and load its weights; nothing is packed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
    from vllm.engine.arg_utils import EngineArgs

    config: Any = EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        tensor_parallel_size=num_workers,
        enforce_eager=True,
        distributed_executor_backend="mp",
    ).create_engine_config()
    with set_current_vllm_config(config):
        try:
            store = f"file://{scratch / 'store'}"
            parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=store, backend="gloo")
            parallel_state.initialize_model_parallel(1)
            yield [_loaded(config, folder, num_workers, rank) for rank in range(num_workers)]
        finally:
            cleanup_dist_env_and_memory()


def _loaded(config: Any, folder: Path, num_workers: int, rank: int) -> nn.Module:  # noqa: ANN401 - vLLM is not type-checked here
    from shoal_rollout.checkpoint_shapes import read_tensors
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Layers register under their names; the same names come again with every rank.
    config.compilation_config.static_forward_context.clear()
    group = parallel_state._TP
    claimed = copy.copy(group)
    claimed.world_size, claimed.rank_in_group = num_workers, rank
    parallel_state._TP = claimed
    try:
        with set_default_torch_dtype(torch.float32):
            model: Any = initialize_model(config)
        model.load_weights(read_tensors(folder))
    finally:
        parallel_state._TP = group
    return model  # type: ignore[no-any-return]  # as above
