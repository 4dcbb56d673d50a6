"""Where the tensors of a checkpoint are kept in the Hugging Face model that is trained.

Most are parameters under the same name. But transformers keeps a mixture's experts stacked in one parameter and takes them apart when it
saves. What saving does is recorded on tensors without data, in the way that loading into the engine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from shoal.telemetry.logs import get_logger
from shoal_rollout.load_recorder import LoadRecorder, Origin, RecordedLoad

_log = get_logger(__name__)


def trained_origins(folder: Path, checkpoint: Mapping[str, Tensor]) -> dict[str, Origin]:
    """Find what the trained model calls the checkpoint's tensors.

    Returns: by checkpoint name; tensors that are parameters under their own name, and what cannot be found, are left out. A push
        of a tensor that the trainer does not have is refused when it is planned.
    """
    try:
        return _origins(folder, checkpoint)
    except Exception as error:  # noqa: BLE001 - transformers may not know the model, and a model's own code may raise anything
        _log.warning("trained_form_unknown", folder=str(folder), error=f"{type(error).__name__}: {error}")
        return {}


def _origins(folder: Path, checkpoint: Mapping[str, Tensor]) -> dict[str, Origin]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    trained = {name: torch.empty_like(parameter) for name, parameter in model.named_parameters()}
    if trained.keys() >= checkpoint.keys():
        return {}
    recorder = LoadRecorder(trained, {})
    with recorder:
        saved: dict[str, Tensor] = revert_weight_conversion(model, dict(trained))
    found = {name: recorder.origin_of(tensor) for name, tensor in saved.items() if name in checkpoint and name not in trained}
    return {name: origin for name, origin in found.items() if origin is not None and origin.shape == tuple(checkpoint[name].shape)}


def as_trained(load: RecordedLoad, origins: Mapping[str, Origin]) -> RecordedLoad:
    """The same copies, from the trained model's parameters."""
    copies = []
    for copy in load.copies:
        origin = origins.get(copy.source_name)
        if origin is not None:
            copy = replace(copy, source_name=origin.name, source_box=origin.box_of(copy.source_box))
        copies.append(copy)
    return RecordedLoad(copies=tuple(copies), zeros=load.zeros)
