"""Forward passes over padded batches, equal to one pass for each sample.

Padding goes to the right, behind a mask: no token of a causal model sees it, positions count from 0 as without it, and models that pool at
their first token find it where it was. Which token is pooled is taken from the lengths, not looked for among ids, since a model may
have no pad id, or one that real text has too. As in transformers, a model with a pad id is pooled at the last token that is not
this id, even where it stands in the text itself.

Legend: B samples, N longest input, L outputs (labels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from shoal_reward.models.inputs import ModelInput


class Head(StrEnum):
    """How the model's outputs are reached.

    LAST: `score` over the hidden state of the last token. WHOLE: the model pools by itself, which padding does not change. SINGLE: it pools
    by itself, and only for one sample at a time. TOKENS: an output for every token.
    """

    LAST = "last"
    WHOLE = "whole"
    SINGLE = "single"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A loaded model. model: of transformers, in evaluation mode. pad_id: for padding; any id of the vocabulary."""

    model: Any
    head: Head
    device: torch.device
    pad_id: int

    @torch.inference_mode()
    def pooled(self, samples: Sequence[ModelInput]) -> Tensor:
        """Outputs of each sample: [B, L] float32 on the CPU."""
        if self.head is Head.LAST:
            hidden = self.model.base_model(**self._padded(samples)).last_hidden_state
            places = torch.tensor([self._pooled_place(sample.ids) for sample in samples], device=self.device)
            outputs = self.model.score(hidden[torch.arange(len(samples), device=self.device), places])
        elif self.head is Head.WHOLE:
            outputs = self.model(**self._padded(samples)).logits
        else:
            outputs = torch.cat([self.model(**self._padded([sample])).logits for sample in samples])
        return self._on_cpu(outputs)

    @torch.inference_mode()
    def of_tokens(self, samples: Sequence[ModelInput]) -> Tensor:
        """Outputs behind each token: [B, N, L] float32 on the CPU; those of padding have no meaning."""
        padded = self._padded(samples)
        if self.head is Head.LAST:
            return self._on_cpu(self.model.score(self.model.base_model(**padded).last_hidden_state))
        return self._on_cpu(self.model(**padded).logits)

    def _pooled_place(self, ids: Sequence[int]) -> int:
        pad_id = self.model.config.get_text_config().pad_token_id
        if pad_id is None:
            return len(ids) - 1
        return next((place for place in reversed(range(len(ids))) if ids[place] != pad_id), 0)

    def _padded(self, samples: Sequence[ModelInput]) -> dict[str, Tensor]:
        longest = max(len(sample.ids) for sample in samples)
        ids = [[*sample.ids, *[self.pad_id] * (longest - len(sample.ids))] for sample in samples]
        mask = [[1] * len(sample.ids) + [0] * (longest - len(sample.ids)) for sample in samples]
        rows = {"input_ids": ids, "attention_mask": mask}
        if all(sample.type_ids is not None for sample in samples):
            rows["token_type_ids"] = [[*(sample.type_ids or ()), *[0] * (longest - len(sample.ids))] for sample in samples]
        return {name: torch.tensor(row, device=self.device) for name, row in rows.items()}

    def _on_cpu(self, outputs: Tensor) -> Tensor:
        return outputs.to(device="cpu", dtype=torch.float32)
