"""From records to the tensors of one forward pass.

Legend: B records of a micro-batch, P prompt tokens, T response tokens (the longest of the micro-batch), L input positions, N chosen tokens.

Sequences are padded on the right. Attention is causal, so no real position sees padding and no attention mask is needed; the padding id
is 0 and never matters. Masks come from reported lengths, never from ids. The last response token is not fed in: nothing follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import ExperienceRecord, RecordRef, ScoreStatus
from shoal_trainer.inputs import ModelInputs, pad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Records of one forward pass.

    keys: record keys, B of them; empty for a micro-batch of weight 0, whose input is one dummy position.
    group_ids: group of each record.
    inputs: how the sequences lie in the model's input.
    prompt_lengths: [B] int64.
    response_ids: [B, T] int64.
    valid: [B, T] bool, tokens within the reported length.
    response_mask: [B, T] bool, True = trained.
    rollout_logprobs: [B, T] float32.
    rewards: [B, T] float32, outcome on the last trained token, or per-token rewards.
    num_dropped: records that cannot be trained on and are masked out (not scored, empty, ids outside the vocabulary).
    """

    keys: tuple[str, ...]
    group_ids: tuple[str, ...]
    inputs: ModelInputs
    prompt_lengths: Tensor
    response_ids: Tensor
    valid: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    num_dropped: int

    @property
    def num_padded_tokens(self) -> int:
        """Positions that go through the model."""
        return self.inputs.num_positions

    def positions_before(self, mask: Tensor) -> Tensor:
        """Flat input positions whose output predicts the tokens chosen by a [B, T] mask, in row-major order: [N] int64."""
        rows, columns = mask.nonzero(as_tuple=True)
        return self.inputs.starts[rows] + self.prompt_lengths[rows] - 1 + columns

    def pad(self, packed: Tensor, mask: Tensor) -> Tensor:
        """Spread [N] values over the True slots of a [B, T] mask, 0 elsewhere; differentiable."""
        zeros = torch.zeros(mask.shape, dtype=packed.dtype, device=packed.device)
        return zeros.masked_scatter(mask, packed)

    def unpad(self, padded: Tensor) -> dict[str, NDArray[np.float32]]:
        """Cut a [B, T] tensor into one [T] float32 array of its reported length per record key."""
        lengths = self.valid.sum(dim=1).tolist()
        array = padded.detach().float().cpu().numpy()
        return {key: array[row, :length].copy() for row, (key, length) in enumerate(zip(self.keys, lengths, strict=True))}

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors."""
        if device.type == "cpu":
            return self
        names = ("prompt_lengths", "response_ids", "valid", "response_mask", "rollout_logprobs", "rewards")
        return replace(self, inputs=self.inputs.to(device), **{name: getattr(self, name).to(device) for name in names})


def build_micro_batch(refs: Sequence[RecordRef], records: Sequence[ExperienceRecord], vocab_size: int) -> MicroBatch:
    """Pad records into one micro-batch.

    Args:
        refs: names of the records, in the same order.
        records: what Redis holds; none for a padding micro-batch.
        vocab_size: ids outside [0, vocab_size) cannot be trained on.
    """
    usable = [_is_usable(record, vocab_size) for record in records]
    num_tokens = max([1, *(len(record.response_ids) for record in records)])
    arrays = _Arrays.empty(len(records), num_tokens)
    for row, (record, good) in enumerate(zip(records, usable, strict=True)):
        arrays.valid[row, : len(record.response_ids)] = True
        if good:
            arrays.fill(row, record)
    return MicroBatch(
        keys=tuple(ref.key for ref in refs),
        group_ids=tuple(ref.group_id for ref in refs),
        inputs=pad_rows([_input_ids(record, good) for record, good in zip(records, usable, strict=True)]),
        prompt_lengths=torch.from_numpy(arrays.prompt_lengths),
        response_ids=torch.from_numpy(arrays.response_ids),
        valid=torch.from_numpy(arrays.valid),
        response_mask=torch.from_numpy(arrays.response_mask),
        rollout_logprobs=torch.from_numpy(arrays.rollout_logprobs),
        rewards=torch.from_numpy(arrays.rewards),
        num_dropped=usable.count(False),
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    prompt_lengths: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    valid: NDArray[np.bool_]
    response_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]

    @classmethod
    def empty(cls, num_records: int, num_tokens: int) -> _Arrays:
        """Room for records of up to num_tokens response tokens, nothing of it trained."""
        shape = (num_records, num_tokens)
        return cls(
            # 1, so that a dropped record still points at a real position.
            prompt_lengths=np.ones(num_records, np.int64),
            response_ids=np.zeros(shape, np.int64),
            valid=np.zeros(shape, np.bool_),
            response_mask=np.zeros(shape, np.bool_),
            rollout_logprobs=np.zeros(shape, np.float32),
            rewards=np.zeros(shape, np.float32),
        )

    def fill(self, row: int, record: ExperienceRecord) -> None:
        """Write a record into its row."""
        num_response = len(record.response_ids)
        self.prompt_lengths[row] = len(record.prompt_ids)
        self.response_ids[row, :num_response] = record.response_ids
        self.response_mask[row, :num_response] = record.response_mask
        self.rollout_logprobs[row, :num_response] = record.rollout_logprobs
        self.rewards[row, :num_response] = _token_rewards(record)


def _token_rewards(record: ExperienceRecord) -> NDArray[np.float32]:
    if record.token_rewards is not None:
        return record.token_rewards
    rewards = np.zeros(len(record.response_ids), np.float32)
    trained = np.flatnonzero(record.response_mask)
    if trained.size:
        rewards[trained[-1]] = record.reward
    return rewards


def _is_usable(record: ExperienceRecord, vocab_size: int) -> bool:
    ids = np.concatenate((record.prompt_ids, record.response_ids))
    return bool(
        record.reward_status is ScoreStatus.SCORED
        and len(record.prompt_ids) > 0
        and len(record.response_ids) > 0
        and ids.min() >= 0
        and ids.max() < vocab_size
        and np.isfinite(record.reward)
        and np.isfinite(record.rollout_logprobs[record.response_mask]).all()
    )


def _input_ids(record: ExperienceRecord, is_usable: bool) -> NDArray[np.int32]:
    """What is fed in; one id that does not matter in place of a record that is not used."""
    return np.concatenate((record.prompt_ids, record.response_ids[:-1])) if is_usable else np.zeros(1, np.int32)
