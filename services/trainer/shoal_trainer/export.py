"""Writes the policy as a Hugging Face folder, one parameter at a time.

Every rank takes part in gathering each parameter; only rank 0 keeps it, and only until its shard file is written. The folder appears under
its name when it is complete: readers never see half of it.

A policy with adapters is written merged, as engines serve it, and `adapter/` in the folder has the adapter alone, for peft to put on the
base model.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.config.gang import LoraSection
from shoal.errors import CapacityError, InvalidRequestError
from shoal.types import ExportResult
from shoal_trainer.distributed import RankContext
from shoal_trainer.lora import ADAPTER, adapter_config, short_names
from shoal_trainer.merging import MergedWeight, ServedWeights, whole_on_rank_0
from shoal_trainer.models import PolicyModel

SHARD_BYTES = 1 << 30
"""Largest safetensors file, and with it what rank 0 holds at once (a single larger parameter gets a file of its own)."""

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "spiece.model",
    "sentencepiece*.model",
)


class Exporter:
    """Exports one policy; every rank calls it.

    Args:
        served: what is written of the policy.
        model_path: folder or id that the policy was loaded from; its tokenizer goes along.
        shard_bytes: largest safetensors file.
    """

    def __init__(
        self, policy: PolicyModel, served: ServedWeights, model_path: str, context: RankContext, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._policy = policy
        self._served = served
        self._model_path = model_path
        self._context = context
        self._shard_bytes = shard_bytes

    def export(self, folder: str, policy_version: int) -> ExportResult:
        """Write the folder, replacing one that is there.

        Args:
            folder: absolute path on this file system.
        Raises: InvalidRequestError: not an absolute path, or a file is in the way. CapacityError: it cannot be written.
        """
        target = Path(folder)
        if not target.is_absolute():
            raise InvalidRequestError(f"export folder {folder!r} is not absolute; give an absolute path")
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with self._writing(folder):
                self._make_room(target, partial)
            num_bytes = self._write_weights(partial, folder)
            if self._served.lora is not None:
                num_bytes += self._write_adapter(partial / "adapter", folder, self._served.lora)
            with self._writing(folder):
                self._write_description(partial)
                self._publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return ExportResult(folder=folder, policy_version=policy_version, num_bytes=num_bytes)

    @contextmanager
    def _writing(self, folder: str) -> Iterator[None]:
        """A block that rank 0 writes in; errors of the file system become CapacityError, and end the export on every rank."""
        with self._context.agreed():
            try:
                yield
            except (OSError, SafetensorError) as error:
                raise CapacityError(f"cannot write the export to {folder!r}: {error}; free space there or choose another path") from error

    def _write_weights(self, partial: Path, folder: str) -> int:
        shards = _plan_shards(self._served.parameters, self._shard_bytes)
        for file_name, parameters in shards.items():
            tensors = self._gather(parameters)
            with self._writing(folder):
                if self._context.rank == 0:
                    save_file(tensors, partial / file_name, metadata={"format": "pt"})
        total = sum(_num_bytes(parameter) for parameters in shards.values() for parameter in parameters.values())
        if len(shards) > 1 and self._context.rank == 0:
            weight_map = {name: file_name for file_name, parameters in shards.items() for name in parameters}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        return total

    def _write_adapter(self, partial: Path, folder: str, lora: LoraSection) -> int:
        adapters = self._served.adapters
        tensors = self._gather({f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": one for name, one in adapters.items()})
        with self._writing(folder):
            if self._context.rank == 0:
                partial.mkdir()
                save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
                names = short_names(self._policy.language_model, self._served.adapted_layers)
                adapter_config(lora, names, self._model_path).save_pretrained(partial)
        return sum(_num_bytes(parameter) for parameter in adapters.values())

    def _gather(self, parameters: Mapping[str, DTensor | MergedWeight]) -> dict[str, Tensor]:
        """Whole parameters on rank 0's CPU; none on the other ranks."""
        context = self._context
        gathered = ((name, whole_on_rank_0(parameter, context.device, context.rank)) for name, parameter in parameters.items())
        return {name: whole for name, whole in gathered if whole is not None}

    def _write_description(self, partial: Path) -> None:
        if self._context.rank != 0:
            return
        language_model: Any = self._policy.language_model
        language_model.config.save_pretrained(partial)
        if language_model.can_generate():
            language_model.generation_config.save_pretrained(partial)
        copy_tokenizer(self._model_path, partial)

    def _make_room(self, target: Path, partial: Path) -> None:
        if self._context.rank != 0:
            return
        if target.exists() and not target.is_dir():
            raise InvalidRequestError(f"export folder {str(target)!r} is a file; choose another path")
        partial.mkdir(parents=True)

    def _publish(self, partial: Path, target: Path) -> None:
        """Put the finished folder in place; an older one is moved away first, since a folder cannot be replaced in one call."""
        if self._context.rank != 0:
            return
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
        if target.exists():
            os.rename(target, old)
        os.rename(partial, target)
        shutil.rmtree(old, ignore_errors=True)


def copy_tokenizer(model_path: str, target: Path) -> None:
    """Copy a model's tokenizer files as they are; a model without any has none to copy."""
    source = Path(model_path)
    if not source.is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(model_path).save_pretrained(target)
        return
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _plan_shards(parameters: Mapping[str, DTensor | MergedWeight], shard_bytes: int) -> dict[str, dict[str, DTensor | MergedWeight]]:
    """File name -> parameters, in order; as few files as the limit allows."""
    groups: list[dict[str, DTensor | MergedWeight]] = [{}]
    filled = 0
    for name, parameter in parameters.items():
        size = _num_bytes(parameter)
        if groups[-1] and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = parameter
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, start=1)}


def _num_bytes(parameter: DTensor | MergedWeight) -> int:
    live = parameter.base if isinstance(parameter, MergedWeight) else parameter
    return live.numel() * live.element_size()
