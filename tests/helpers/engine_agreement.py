"""The trainer's own log-probabilities of what an engine has sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.models import PolicyModel, load_policy

from shoal.types import Completion, ExperienceRecord
from tests.helpers.inprocess_engine import Ask
from tests.helpers.trainer_bench import make_record, one_rank, ref_of, run_config

_MICRO_BATCH = 5


def record_of(index: int, ask: Ask, completion: Completion) -> ExperienceRecord:
    """What the coordinator would write of a completion."""
    return make_record(
        index,
        num_response=len(completion.response_ids),
        prompt_ids=np.array(ask.prompt_ids, dtype=np.int32),
        response_ids=completion.response_ids,
        rollout_logprobs=completion.rollout_logprobs,
        policy_version_spans=completion.policy_version_spans,
        sampling=ask.sampling,
        finish_reason=completion.finish_reason,
    )


class TrainerScores:
    """The policy of a folder, loaded and sharded as an actor of one rank loads it; one at a time, and none while an engine lives here."""

    def __init__(self, folder: Path) -> None:
        config = run_config(folder)
        self._gang = one_rank(config)
        context = self._gang.__enter__()
        self.policy: PolicyModel = load_policy(str(folder), config.model, config.actor, context, trainable=True)

    def close(self) -> None:
        """Leave the gang of one."""
        self._gang.__exit__(None, None, None)

    def logprobs(self, records: Sequence[ExperienceRecord], temperature: float, *, with_gradient: bool) -> list[NDArray[np.float32]]:
        """Log-probabilities of every record's response, [T] each, as a forward pass for old ones or one of an update computes them."""
        found: list[NDArray[np.float32]] = []
        for start in range(0, len(records), _MICRO_BATCH):
            part = records[start : start + _MICRO_BATCH]
            micro = build_micro_batch([ref_of(record) for record in part], part, self.policy.vocab_size)
            assert micro.num_dropped == 0
            mask = micro.response_mask
            # By the reported length: EOS is trained, what pads is not, whichever id they share.
            assert mask.sum(dim=1).tolist() == [len(record.response_ids) for record in part]
            with torch.set_grad_enabled(with_gradient):
                packed, _ = self.policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], temperature, with_gradient)
            found += [tensor.detach().numpy() for tensor in packed.split([len(record.response_ids) for record in part])]
        return found
