"""Splits a step's groups into mini-batches, ranks and micro-batches. Pure and deterministic: the order of arrival is irrelevant.

Mini-batches depend on the groups alone, so gangs of different size agree on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import InvalidRequestError
from shoal.queue.entries import QueuedGroup
from shoal.types import Batch, MiniBatch, RecordRef

Refs = tuple[RecordRef, ...]


def plan_batch(
    groups: Sequence[QueuedGroup], num_ranks: int, mini_batches: int, micro_batch_tokens: int, run_id: str, step: int, batch_id: str = ""
) -> Batch:
    """Plan one training step of one gang.

    Mini-batches get equally many samples as far as whole groups allow; with fewer groups than mini-batches, groups are
    split. Within a mini-batch the ranks' token counts are balanced. A rank's micro-batches hold sequences of similar
    length; num_sequences x (longest prompt + longest response) stays within micro_batch_tokens, unless one sequence alone
    is longer. Ranks with fewer micro-batches get empty ones (weight 0).

    Args:
        groups: of this step.
        num_ranks: processes of the gang.
        mini_batches: optimizer steps per pass.
        micro_batch_tokens: padded tokens of a forward pass of one rank.
        run_id, step, batch_id: written into the batch.
    Raises: InvalidRequestError: a size is not positive, a record occurs twice, or there are fewer samples than mini-batches.
    """
    sizes = {"num_ranks": num_ranks, "mini_batches": mini_batches, "micro_batch_tokens": micro_batch_tokens}
    _check_sizes(groups, sizes)
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for refs in _split_groups(groups, mini_batches):
        for rank, mini_batch in enumerate(_plan_mini_batch(refs, num_ranks, micro_batch_tokens)):
            ranks[rank].append(mini_batch)
    return Batch(run_id=run_id, step=step, ranks=tuple(map(tuple, ranks)), batch_id=batch_id)


def padded_tokens(refs: Sequence[RecordRef]) -> int:
    """Tokens of a forward pass over refs, prompts and responses padded to the longest of each."""
    if not refs:
        return 0
    return len(refs) * (max(ref.num_prompt_tokens for ref in refs) + max(ref.num_response_tokens for ref in refs))


def _check_sizes(groups: Sequence[QueuedGroup], sizes: dict[str, int]) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InvalidRequestError(f"{name} is {value}: it should be at least 1")
    keys = [ref.key for group in groups for ref in group.refs]
    if len(set(keys)) != len(keys):
        raise InvalidRequestError(f"{len(keys) - len(set(keys))} of {len(keys)} records occur twice in the step's groups")
    if len(keys) < sizes["mini_batches"]:
        raise InvalidRequestError(
            f"{len(keys)} samples cannot be split into {sizes['mini_batches']} mini-batches: lower algorithm.mini_batches, "
            "or raise rollout.prompts_per_step or rollout.group_size"
        )


def _num_tokens(ref: RecordRef) -> int:
    return ref.num_prompt_tokens + ref.num_response_tokens


def _split_groups(groups: Sequence[QueuedGroup], mini_batches: int) -> list[list[RecordRef]]:
    """Whole groups to the mini-batch with the fewest samples; single samples if there are too few groups."""
    ordered = sorted(groups, key=lambda group: (-len(group.refs), group.group_id, group.entry_id))
    units = [sorted(group.refs, key=lambda ref: ref.key) for group in ordered if group.refs]
    if len(units) < mini_batches:
        units = [[ref] for unit in units for ref in unit]
    parts: list[list[RecordRef]] = [[] for _ in range(mini_batches)]
    for unit in units:
        min(parts, key=len).extend(unit)
    return parts


def _plan_mini_batch(refs: Sequence[RecordRef], num_ranks: int, micro_batch_tokens: int) -> list[MiniBatch]:
    ranks = [_fill_micro_batches(own, micro_batch_tokens) for own in _balance(refs, num_ranks)]
    num_micro_batches = max(map(len, ranks))
    return [MiniBatch(micro_batches=(*filled, *[()] * (num_micro_batches - len(filled)))) for filled in ranks]


def _balance(refs: Sequence[RecordRef], num_ranks: int) -> list[list[RecordRef]]:
    """Longest first, each to the rank with the fewest tokens so far."""
    ranks: list[list[RecordRef]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for ref in sorted(refs, key=lambda ref: (-_num_tokens(ref), ref.key)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], len(ranks[rank])))
        ranks[rank].append(ref)
        loads[rank] += _num_tokens(ref)
    return ranks


def _fill_micro_batches(refs: Sequence[RecordRef], micro_batch_tokens: int) -> list[Refs]:
    """Cut refs, which are sorted by length, into runs that fit the budget (see `padded_tokens`)."""
    filled: list[Refs] = []
    run: list[RecordRef] = []
    longest_prompt = longest_response = 0
    for ref in refs:
        longest_prompt = max(longest_prompt, ref.num_prompt_tokens)
        longest_response = max(longest_response, ref.num_response_tokens)
        if run and (len(run) + 1) * (longest_prompt + longest_response) > micro_batch_tokens:
            filled.append(tuple(run))
            run = []
            longest_prompt, longest_response = ref.num_prompt_tokens, ref.num_response_tokens
        run.append(ref)
    return [*filled, tuple(run)] if run else filled
