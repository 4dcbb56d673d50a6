"""From records to the tensors of one forward pass.

Legend: B records of a micro-batch, P prompt tokens, T response tokens (the longest of the micro-batch), C components of the reward,
N chosen tokens.

How sequences lie in the model's input is the layout's business (`shoal_trainer.inputs`): attention is causal and no sequence sees another
one or padding. Masks come from reported lengths, never from ids. The last response token is not fed in, since nothing follows it, except
where a value after it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import ExperienceRecord, FinishReason, RecordRef, ScoreStatus
from shoal_trainer.inputs import Layout, ModelInputs, pad_rows


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
    scores: [B] float32, reward of the response; NaN where it is given per token, or the record cannot be trained on.
    has_token_rewards: [B] bool.
    token_rewards: [B, T] float32, rewards given per token; 0 for other records.
    components: [B, C] float32, named parts of the reward, NaN where there is none.
    baselines: [B] float32, reward of the prompt's greedy answer, NaN where there is none.
    truncated: [B] bool, cut by the length limit; False for records that cannot be trained on.
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
    scores: Tensor
    has_token_rewards: Tensor
    token_rewards: Tensor
    components: Tensor
    baselines: Tensor
    truncated: Tensor
    num_dropped: int

    @property
    def num_padded_tokens(self) -> int:
        """Positions that go through the model."""
        return self.inputs.num_positions

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64, reported."""
        return self.valid.sum(dim=1)

    def loss_mask(self, *, mask_truncated: bool) -> Tensor:
        """Tokens whose loss counts, [B, T] bool: the trained ones, without those of truncated responses if these are left out."""
        return self.response_mask & ~self.truncated[:, None] if mask_truncated else self.response_mask

    def positions_before(self, mask: Tensor) -> Tensor:
        """Flat input positions whose output predicts the tokens chosen by a [B, T] mask, in row-major order: [N] int64."""
        rows, columns = mask.nonzero(as_tuple=True)
        return self.inputs.starts[rows] + self.prompt_lengths[rows] - 1 + columns

    def positions_of_last(self, chosen: Tensor) -> Tensor:
        """Flat input positions of the last response token of chosen records, [B] bool, whose input contains it: [N] int64."""
        rows = chosen.nonzero(as_tuple=True)[0]
        return self.inputs.starts[rows] + self.prompt_lengths[rows] + self.response_lengths[rows] - 1

    def pad(self, packed: Tensor, mask: Tensor) -> Tensor:
        """Spread [N] values over the True slots of a mask, [B, T] or [B], 0 elsewhere; differentiable."""
        zeros = torch.zeros(mask.shape, dtype=packed.dtype, device=packed.device)
        return zeros.masked_scatter(mask, packed)

    def unpad(self, padded: Tensor) -> dict[str, NDArray[np.float32]]:
        """Cut a [B, T] tensor into one [T] float32 array of its reported length per record key."""
        array = padded.detach().float().cpu().numpy()
        return {key: array[row, :length].copy() for row, (key, length) in enumerate(zip(self.keys, self._lengths(), strict=True))}

    def pad_column(self, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """Pad one [T] array of its reported length per record: [B, T] float32."""
        padded = torch.zeros(self.valid.shape, dtype=torch.float32)
        for row, (value, length) in enumerate(zip(values, self._lengths(), strict=True)):
            if len(value) != length:
                raise ValueError(f"{len(value)} values for the {length} response tokens of {self.keys[row]!r}")
            padded[row, :length] = torch.tensor(value)
        return padded.to(self.valid.device)

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors."""
        if device.type == "cpu":
            return self
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        moved = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
        return replace(self, **fields | moved | {"inputs": self.inputs.to(device)})

    def _lengths(self) -> list[int]:
        lengths: list[int] = self.response_lengths.tolist()
        return lengths


def build_micro_batch(
    refs: Sequence[RecordRef],
    records: Sequence[ExperienceRecord],
    vocab_size: int,
    *,
    layout: Layout = pad_rows,
    component_names: Sequence[str] = (),
    feed_cut_ends: bool = False,
) -> MicroBatch:
    """Put records into one micro-batch.

    Args:
        refs: names of the records, in the same order.
        records: what Redis holds; none for a padding micro-batch.
        vocab_size: ids outside [0, vocab_size) cannot be trained on.
        layout: how the sequences lie in the model's input.
        component_names: parts of the reward to read, C of them.
        feed_cut_ends: feed the last token of truncated responses in too, so that there is an output after it.
    """
    usable = [_is_usable(record, vocab_size) for record in records]
    num_tokens = max([1, *(len(record.response_ids) for record in records)])
    arrays = _Arrays.empty(len(records), num_tokens, len(component_names))
    for row, (record, good) in enumerate(zip(records, usable, strict=True)):
        arrays.valid[row, : len(record.response_ids)] = True
        if good:
            arrays.fill(row, record, component_names)
    sequences = [_input_ids(record, good, feed_cut_ends) for record, good in zip(records, usable, strict=True)]
    return MicroBatch(
        keys=tuple(ref.key for ref in refs),
        group_ids=tuple(ref.group_id for ref in refs),
        inputs=layout(sequences),
        num_dropped=usable.count(False),
        **{name: torch.from_numpy(getattr(arrays, name)) for name in arrays.__slots__},
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a `MicroBatch`, under its names."""

    prompt_lengths: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    valid: NDArray[np.bool_]
    response_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    scores: NDArray[np.float32]
    has_token_rewards: NDArray[np.bool_]
    token_rewards: NDArray[np.float32]
    components: NDArray[np.float32]
    baselines: NDArray[np.float32]
    truncated: NDArray[np.bool_]

    @classmethod
    def empty(cls, num_records: int, num_tokens: int, num_components: int) -> _Arrays:
        """Room for records of up to num_tokens response tokens, nothing of it trained."""
        shape = (num_records, num_tokens)
        return cls(
            # 1, so that a dropped record still points at a real position.
            prompt_lengths=np.ones(num_records, np.int64),
            response_ids=np.zeros(shape, np.int64),
            valid=np.zeros(shape, np.bool_),
            response_mask=np.zeros(shape, np.bool_),
            rollout_logprobs=np.zeros(shape, np.float32),
            scores=np.full(num_records, np.nan, np.float32),
            has_token_rewards=np.zeros(num_records, np.bool_),
            token_rewards=np.zeros(shape, np.float32),
            components=np.full((num_records, num_components), np.nan, np.float32),
            baselines=np.full(num_records, np.nan, np.float32),
            truncated=np.zeros(num_records, np.bool_),
        )

    def fill(self, row: int, record: ExperienceRecord, component_names: Sequence[str]) -> None:
        """Write a record into its row."""
        num_response = len(record.response_ids)
        self.prompt_lengths[row] = len(record.prompt_ids)
        self.response_ids[row, :num_response] = record.response_ids
        self.response_mask[row, :num_response] = record.response_mask
        self.rollout_logprobs[row, :num_response] = record.rollout_logprobs
        self.truncated[row] = record.finish_reason is FinishReason.LENGTH
        self._fill_rewards(row, record, component_names)

    def _fill_rewards(self, row: int, record: ExperienceRecord, component_names: Sequence[str]) -> None:
        if record.token_rewards is None:
            # The reward lies on the last trained token; without one there is nothing that it could reach.
            self.scores[row] = record.reward if record.response_mask.any() else np.nan
        else:
            self.has_token_rewards[row] = True
            self.token_rewards[row, : len(record.token_rewards)] = record.token_rewards
        self.baselines[row] = np.nan if record.baseline_reward is None else record.baseline_reward
        if component_names:
            scored = {part.name: part.value for part in record.reward_components if part.status is ScoreStatus.SCORED}
            self.components[row] = [scored.get(name, np.nan) for name in component_names]


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
        and _has_finite_token_rewards(record)
    )


def _has_finite_token_rewards(record: ExperienceRecord) -> bool:
    if record.token_rewards is None:
        return True
    if len(record.token_rewards) != len(record.response_ids):
        return False
    return bool(np.isfinite(record.token_rewards[record.response_mask]).all())


def _input_ids(record: ExperienceRecord, is_usable: bool, feed_cut_ends: bool) -> NDArray[np.int32]:
    """What is fed in; one id that does not matter in place of a record that is not used."""
    if not is_usable:
        return np.zeros(1, np.int32)
    feeds_end = feed_cut_ends and record.finish_reason is FinishReason.LENGTH
    return np.concatenate((record.prompt_ids, record.response_ids if feeds_end else record.response_ids[:-1]))
