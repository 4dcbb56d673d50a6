"""The trained modules, sharded with FSDP2.

Legend: B sequences, L input positions, N chosen positions, H hidden size, V vocabulary.

Each decoder block is one FSDP group and the wrapper is the root group; the output embedding (which may be tied to the input embedding) is
used inside the root's forward, where its weight is whole. Only chosen positions go through it, chunk by chunk, so [B, L, V] never exists.
Modules stay in eval mode: dropout would make the probability ratio of fresh data differ from 1. A reference and a critic go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shoal.algo.logprobs import token_logprobs
from shoal.config.gang import GangSection
from shoal.config.models import ModelSection
from shoal.errors import ConfigError
from shoal.vocabulary import sampled_vocab_size
from shoal_trainer.attention import attention_implementation
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout, ModelInputs, pack_rows, pad_rows
from shoal_trainer.lora import add_adapters
from shoal_trainer.packing import choose_packing

# transformers is untyped and takes seconds to import: it is imported where a model is loaded.
_Pretrained: TypeAlias = Any

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32. Each chunk adds to the whole gradient of the head, so small ones cost memory traffic."""

_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class PolicyModel(nn.Module):
    """A causal language model that answers log-probabilities of given tokens."""

    def __init__(self, language_model: _Pretrained, vocab_size: int, *, packs: bool = False) -> None:
        """Args:
        language_model: a Hugging Face causal language model.
        vocab_size: ids [0, vocab_size) are normalised over, as the engine samples from them.
        packs: it is to be fed with packed sequences.
        """
        super().__init__()
        self.language_model = language_model
        self.vocab_size = vocab_size
        self.packs = packs

    def forward(
        self, inputs: ModelInputs, positions: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Score tokens.

        Args:
            inputs: sequences.
            positions: [N] int64 into the flattened input, the position before each token.
            token_ids: [N] int64.
            temperature: divides the logits.
            with_entropy: False skips the entropies.
        Returns: log-probabilities and entropies, each [N] float32.
        """
        hidden = _last_hidden(self.language_model.get_decoder(), inputs, positions)
        weight = self.language_model.get_output_embeddings().weight
        return token_logprobs(
            hidden,
            weight,
            token_ids,
            temperature=temperature,
            vocab_size=self.vocab_size,
            with_entropy=with_entropy,
            chunk_elements=CHUNK_ELEMENTS,
        )

    def score(self, inputs: ModelInputs, positions: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Score tokens at temperature 1, and find the most probable ones; call it without gradients.

        Args: as `forward`.
        Returns: log-probabilities, [N] float32, and greedy ids, [N] int64.
        """
        hidden = _last_hidden(self.language_model.get_decoder(), inputs, positions)
        weight = self.language_model.get_output_embeddings().weight
        logprobs, _ = token_logprobs(
            hidden, weight, token_ids, vocab_size=self.vocab_size, with_entropy=False, chunk_elements=CHUNK_ELEMENTS
        )
        rows = max(1, CHUNK_ELEMENTS // self.vocab_size)
        greedy = [(part @ weight[: self.vocab_size].T).argmax(dim=-1) for part in torch.split(hidden, rows)]
        return logprobs, torch.cat(greedy)


class ValueHead(nn.Module):
    """A linear map to one number, kept in float32; zero at first, so that the first advantages are the rewards themselves."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, H] float32 -> [N] float32."""
        return hidden @ self.weight + self.bias


class ValueModel(nn.Module):
    """The backbone of a causal language model with a value head."""

    def __init__(self, backbone: _Pretrained, *, packs: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.packs = packs
        self.value_head = ValueHead(backbone.config.get_text_config().hidden_size)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """Value before each token.

        Args:
            inputs: sequences.
            positions: [N] int64 into the flattened input.
        Returns: [N] float32.
        """
        return cast("Tensor", self.value_head(_last_hidden(self.backbone, inputs, positions).float()))


def load_policy(path: str, model: ModelSection, gang: GangSection, context: RankContext, *, trainable: bool, seed: int = 0) -> PolicyModel:
    """Load and shard a policy, or a frozen reference; both normalise over the ids that the tokenizer of `model.path` knows.

    Args:
        seed: of the adapters, if the policy is trained with `gang.lora`.
    Raises: ConfigError: no such model, one whose logits are changed after the output embedding, or one that a setting does not fit.
    """
    language_model = _load("AutoModelForCausalLM", path, model, gang, context)
    _check_logits(language_model, path)
    vocab_size = sampled_vocab_size(model.path, int(language_model.config.get_text_config().vocab_size))
    packs = choose_packing(language_model.get_decoder(), gang, context)
    policy = PolicyModel(language_model, vocab_size, packs=packs).eval().requires_grad_(trainable)
    if trainable and gang.lora is not None:
        add_adapters(language_model, gang.lora, list(_blocks(language_model)), path=path, seed=seed)
    _shard(policy, language_model, gang, context, trainable=trainable)
    # FSDP gathers parameters around `forward` alone unless it is told of other ways in.
    register_fsdp_forward_method(policy, "score")
    return policy


def load_value_model(model: ModelSection, gang: GangSection, context: RankContext) -> ValueModel:
    """Load the backbone of `model.path`, add a value head and shard both. Raises: ConfigError: as `load_policy`."""
    backbone = _load("AutoModel", model.path, model, gang, context)
    value_model = ValueModel(backbone, packs=choose_packing(backbone, gang, context)).eval()
    # Without mixed precision: rounded to bfloat16 a value keeps two digits.
    fully_shard(value_model.value_head, **_sharding(gang, context, trainable=True))
    _shard(value_model, backbone, gang, context, trainable=True)
    return value_model


def layout_for(*models: nn.Module | None) -> Layout:
    """How sequences are laid out that all of these models are fed with; a module of another kind runs one of the others."""
    own = [model for model in models if isinstance(model, PolicyModel | ValueModel)]
    return pack_rows if all(model.packs for model in own) else pad_rows


def named_shards(module: nn.Module) -> dict[str, DTensor]:
    """Sharded parameters under their Hugging Face names; a tied output embedding appears once, as the input embedding.

    Call it while no forward is running: a running one swaps in whole parameters.
    """
    _reshard(module)
    return {name.removeprefix("language_model."): cast("DTensor", parameter) for name, parameter in module.named_parameters()}


def forget_passes(module: nn.Module) -> None:
    """Make FSDP forget forwards that no backward will follow; they would add up, and disturb the order of later backwards.

    Nothing is forgotten of a module that is no FSDP root, such as a reference that runs the policy.
    """
    if isinstance(module, FSDPModule) and _is_started(module):
        module.reset_iter_state()


def num_parameters(module: nn.Module) -> int:
    """Elements of all parameters over all ranks."""
    return sum(math.prod(parameter.shape) for parameter in module.parameters())


def _reshard(module: nn.Module) -> None:
    """Drop gathered parameters; a kept graph gathers them again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _is_started(root: FSDPModule) -> bool:
    """FSDP sets a root up in its first forward."""
    return root._get_fsdp_state()._is_root is True


def _last_hidden(backbone: _Pretrained, inputs: ModelInputs, positions: Tensor) -> Tensor:
    hidden: Tensor = backbone(**inputs.arguments()).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, positions)


def _load(factory: str, path: str, model: ModelSection, gang: GangSection, context: RankContext) -> _Pretrained:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        auto = getattr(transformers, factory)
        attention = attention_implementation(gang, context.device, config.get_text_config(), has_sdpa=_has_sdpa(auto, config))
        loaded = auto.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        found = "is not a folder here" if not Path(path).is_dir() else "cannot be loaded"
        raise ConfigError(
            f"model {path!r} {found}: {str(error)[:300]}; give a Hugging Face folder or id with safetensors weights"
        ) from error
    loaded.config.use_cache = False
    return loaded


def _has_sdpa(auto: Any, config: Any) -> bool:  # noqa: ANN401 - transformers is untyped
    """Whether transformers lets the model of a configuration use fused attention; a model of its own code says so when it is made."""
    cls = auto._model_mapping.get(type(config), None)
    return bool(getattr(cls, "_supports_sdpa", True))


def _check_logits(language_model: _Pretrained, path: str) -> None:
    """Refuse models whose logits are more than hidden @ weight.T: their log-probabilities would silently be wrong."""
    config = language_model.config.get_text_config()
    for name, neutral in _LOGIT_CHANGES.items():
        value = getattr(config, name, neutral)
        if value not in (None, neutral):
            raise ConfigError(f"model {path!r} has {name}={value}, which is not supported; choose a model without it")
    if getattr(language_model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model {path!r} has a bias on its output embedding, which is not supported; choose a model without it")


def _shard(root: nn.Module, pretrained: _Pretrained, gang: GangSection, context: RankContext, *, trainable: bool) -> None:
    options = _sharding(gang, context, trainable=trainable)
    if gang.precision == "bf16_mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in _blocks(pretrained):
        if gang.activation_checkpointing and trainable:
            _checkpoint(block)
        fully_shard(block, **options)
    fully_shard(root, **options)


def _sharding(gang: GangSection, context: RankContext, *, trainable: bool) -> dict[str, Any]:
    """Options of `fully_shard`. A frozen model has no backward that could still use what its forward gathered."""
    options: dict[str, Any] = {"mesh": context.mesh, "reshard_after_forward": gang.reshard_after_forward or not trainable}
    if gang.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
    return options


def _checkpoint(block: nn.Module) -> None:
    """Compute a block again in the backward, inside of FSDP's hooks, which gather its parameters for that.

    The method is replaced, not the module wrapped: parameters keep their names.
    """
    # Without dropout there is no random state to restore.
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _blocks(pretrained: _Pretrained) -> Iterator[nn.Module]:
    """The decoder blocks, as the model's own class names them."""
    names = set(pretrained._no_split_modules or ())
    return (module for module in pretrained.modules() if type(module).__name__ in names)
