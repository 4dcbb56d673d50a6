"""Low-rank adapters on the linear layers of a policy, by peft.

The model keeps its class: peft puts a layer with the adapter around each linear layer, inside the decoder blocks that FSDP shards. Only
adapters are trained. Without them the model is the one that was loaded, which is how a run saves a second copy as reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from shoal.config.gang import LoraSection
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal_trainer.inputs import ModelInputs

if TYPE_CHECKING:
    from shoal_trainer.models import PolicyModel

log = get_logger(__name__)

# peft is untyped and takes seconds to import: it is imported where adapters are made.
_Config: TypeAlias = Any
_Pretrained: TypeAlias = Any

ADAPTER = "default"
"""peft's name of the only adapter; part of parameter names."""
_MAX_NAMES = 20


def add_adapters(language_model: _Pretrained, lora: LoraSection, blocks: Sequence[nn.Module], *, path: str, seed: int) -> None:
    """Put adapters into a model that is not sharded yet, and freeze everything else.

    B is zero, so that the first ratio to the model as it was loaded is exactly 1; A is drawn uniformly in +-1 / sqrt(inputs), the same on
    every rank.

    Args:
        language_model: a Hugging Face causal language model; changed in place.
        lora: which layers get an adapter, and how large a one.
        blocks: its decoder blocks.
        path: where the model was loaded from; goes into the adapter's description.
        seed: of A.
    Raises: ConfigError: a name in `target_modules` that is no linear layer of the blocks, or blocks without any.
    """
    from peft import inject_adapter_in_model

    names = target_names(language_model, lora, blocks, path)
    num_base = sum(parameter.numel() for parameter in language_model.parameters())
    language_model.requires_grad_(False)
    inject_adapter_in_model(adapter_config(lora, names, path), language_model, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in map(language_model.get_submodule, names):
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            bound = layer.in_features**-0.5
            down.copy_(torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
            up.zero_()
            down.requires_grad_(True)
            up.requires_grad_(True)
    num_trained = sum(parameter.numel() for parameter in language_model.parameters() if parameter.requires_grad)
    log.info("adapters_added", num_layers=len(names), rank=lora.rank, num_trained_parameters=num_trained, num_frozen_parameters=num_base)


def target_names(language_model: _Pretrained, lora: LoraSection, blocks: Sequence[nn.Module], path: str) -> list[str]:
    """Full names of the layers that get an adapter, in the model's order.

    Raises: ConfigError: as `add_adapters`.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    found = {name: module for name, module in language_model.named_modules() if id(module) in inside}
    linear = [name for name, module in found.items() if isinstance(module, nn.Linear)]
    if not linear:
        others = sorted({type(module).__name__ for module in found.values() if not list(module.children())})
        raise ConfigError(
            f"lora needs linear layers in the decoder blocks, and those of model {path!r} have none (they have {', '.join(others)}); "
            "train without lora, or choose a model with linear layers"
        )
    for target in lora.target_modules:
        if not any(_names(name, target) for name in linear):
            raise ConfigError(
                f"lora.target_modules has {target!r}, which is no linear layer of the decoder blocks of model {path!r}; "
                f"there are {', '.join(_leaves(linear))}. Stacked experts, embeddings and the output head get no adapter"
            )
    chosen = [name for name in linear if not lora.target_modules or any(_names(name, target) for target in lora.target_modules)]
    stacked = _stacked_weights(found)
    if stacked and not lora.target_modules:
        log.warning("stacked_weights_get_no_adapter", model=path, weights=stacked[:_MAX_NAMES])
    return chosen


def adapter_config(lora: LoraSection, names: Sequence[str], path: str) -> _Config:
    """peft's description of the adapter.

    Args:
        names: of the layers that have one; a name also stands for every layer that ends with it.
        path: of the base model.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        lora_dropout=0.0,
        target_modules=list(names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        inference_mode=False,
    )


def short_names(language_model: _Pretrained, names: Sequence[str]) -> list[str]:
    """The last parts of layers' names, if no other module ends with one of them; else the names themselves."""
    leaves = _leaves(names)
    ending = {name for name, _ in language_model.named_modules() if _leaf(name) in leaves}
    return leaves if ending == set(names) else list(names)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """A block in which forwards leave adapters out.

    peft's own switch also changes which parameters require gradients, which FSDP must not see between a forward and its backward.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdaptersOff(nn.Module):
    """The policy as it was loaded: the reference of a run with adapters, at no memory. Call it without gradients.

    It has no parameters of its own, and its passes are those of the policy: a graph that the policy keeps stays as it is.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        # Not a submodule: the policy's parameters belong to the policy alone.
        object.__setattr__(self, "_policy", policy)
        self.vocab_size = policy.vocab_size

    def forward(
        self, inputs: ModelInputs, positions: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """See `PolicyModel.forward`."""
        policy: PolicyModel = self._policy  # type: ignore[assignment]  # nn.Module types attributes as Tensor or Module
        with torch.no_grad(), adapters_off(policy):
            scored: tuple[Tensor, Tensor] = policy(inputs, positions, token_ids, temperature, with_entropy)
        return scored


def _names(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _leaves(names: Sequence[str]) -> list[str]:
    return sorted({_leaf(name) for name in names})


def _stacked_weights(modules: Mapping[str, nn.Module]) -> list[str]:
    """Weights of more than two dims, such as a mixture's experts."""
    return [
        f"{name}.{leaf}"
        for name, module in modules.items()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 2
    ]
