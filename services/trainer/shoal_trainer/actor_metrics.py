"""Metrics of the actor's forward: the policy beside the reference and beside the engine, and how responses ended.

Legend: B records of a micro-batch, T response tokens, N trained tokens.

Means are over trained tokens (`response_mask`), those of the update over the tokens of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.algo.kl import k1, k3
from shoal.algo.masking import select
from shoal.config.algorithm import AlgorithmSection
from shoal_trainer.actor_batch import ActorMicroBatch
from shoal_trainer.actor_losses import PolicyObjective
from shoal_trainer.distributed import RankContext
from shoal_trainer.metrics import Tally
from shoal_trainer.quantiles import ratio_quantiles

_COUNTS = ("num_tokens", "num_dropped", "num_masked_truncated")


def forward_metrics(
    micro_batches: Sequence[ActorMicroBatch], objective: PolicyObjective, algorithm: AlgorithmSection, context: RankContext
) -> dict[str, float]:
    """Metrics of a whole batch, the same on every rank. Enters collectives."""
    tally = Tally(context)
    for micro in micro_batches:
        largest_gap = _largest(_engine_gap(micro).abs())
        tally.add(_token_sums(micro) | objective.correction_sums(micro) | _response_sums(micro), {"logprob_max_difference": largest_gap})
    sums, maxima = tally.reduce()
    log_ratios = [_engine_gap(micro)[micro.batch.response_mask] for micro in micro_batches]
    metrics = _means(sums) | maxima | ratio_quantiles("mismatch_ratio", log_ratios, context)
    if not algorithm.mask_truncated:
        del metrics["num_masked_truncated"]
    return metrics


def _token_sums(micro: ActorMicroBatch) -> dict[str, Tensor]:
    """Sums over the trained tokens."""
    mask, logprobs = micro.batch.response_mask, select(micro.logprobs.detach(), micro.batch.response_mask)
    engine = select(micro.batch.rollout_logprobs, mask)
    sums = {
        "num_tokens": mask.sum(),
        "entropy": select(micro.entropies.detach(), mask).sum(),
        "logprob_mean_difference": (engine - logprobs).abs().sum(),
        # The sample is the engine's, so it stands where the policy does in the estimator.
        "mismatch_kl": k3(engine, logprobs).double().sum(),
    }
    if micro.ref_logprobs is not None:
        reference = select(micro.ref_logprobs, mask)
        sums |= {"kl": k1(logprobs, reference).double().sum(), "kl_k3": k3(logprobs, reference).double().sum()}
    return sums


def _response_sums(micro: ActorMicroBatch) -> dict[str, Tensor]:
    """Counts of responses, and tokens of those that ended by themselves."""
    batch = micro.batch
    has_tokens = batch.response_mask.any(dim=1)
    finished = has_tokens & ~batch.truncated
    dropped = torch.tensor(float(batch.num_dropped), device=has_tokens.device)
    return {
        "num_dropped": dropped,
        "num_responses": has_tokens.sum(),
        "num_truncated": (has_tokens & batch.truncated).sum(),
        "num_masked_truncated": (has_tokens & ~micro.loss_mask.any(dim=1)).sum(),
        "num_finished": finished.sum(),
        "finished_tokens": batch.response_lengths[finished].sum(),
    }


def _means(sums: dict[str, float]) -> dict[str, float]:
    counts = {name: sums.pop(name) for name in _COUNTS}
    num_responses, num_truncated = sums.pop("num_responses"), sums.pop("num_truncated")
    num_finished, finished_tokens = sums.pop("num_finished"), sums.pop("finished_tokens")
    metrics = counts | {name: total / max(counts["num_tokens"], 1.0) for name, total in sums.items()}
    if "kl" in sums:
        metrics["kl_per_response"] = sums["kl"] / max(num_responses, 1.0)
    metrics["truncated_fraction"] = num_truncated / max(num_responses, 1.0)
    metrics["finished_length"] = finished_tokens / max(num_finished, 1.0)
    return metrics


def _engine_gap(micro: ActorMicroBatch) -> Tensor:
    """Log-probability of the trainer minus that of the engine, [B, T], 0 where masked."""
    return select(micro.logprobs.detach() - micro.batch.rollout_logprobs, micro.batch.response_mask)


def _largest(x: Tensor) -> Tensor:
    return x.max() if x.numel() else x.new_zeros(())
