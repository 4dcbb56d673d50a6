"""A group as a stream entry: field `group_id`, then one field per record, named by its key, holding lengths and reward.

The entry carries what batching needs, so that the coordinator never reads tokens back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import CodecError
from shoal.types import ExperienceRecord, RecordRef

GROUP_ID_FIELD = b"group_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """A group that was taken from the queue and has to be acknowledged.

    entry_id is the stream's id of it. num_deliveries is the server's own count, this delivery included.
    """

    entry_id: str
    group_id: str
    refs: tuple[RecordRef, ...]
    num_deliveries: int = 1

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all its records."""
        return sum(ref.num_prompt_tokens + ref.num_response_tokens for ref in self.refs)


def encode_meta(record: ExperienceRecord) -> str:
    """What a stream entry says about a record: prompt length, response length, reward."""
    return f"{record.prompt_ids.size},{record.response_ids.size},{record.reward!r}"


def decode_entry(entry_id: bytes, fields: Mapping[bytes, bytes], num_deliveries: int) -> QueuedGroup:
    """Read a stream entry.

    Args:
        entry_id: id that the server gave it.
        fields: what it holds, in the order of writing.
        num_deliveries: how often it has been delivered, this time included.
    Raises: CodecError: the entry was not written by `ExperienceQueue.put_group`.
    """
    if GROUP_ID_FIELD not in fields:
        raise CodecError(f"stream entry {entry_id.decode()} has no group_id: something other than Shoal wrote into the run's stream")
    group_id = fields[GROUP_ID_FIELD].decode()
    refs = tuple(_decode_ref(key, meta, group_id) for key, meta in fields.items() if key != GROUP_ID_FIELD)
    return QueuedGroup(entry_id=entry_id.decode(), group_id=group_id, refs=refs, num_deliveries=num_deliveries)


def _decode_ref(key: bytes, meta: bytes, group_id: str) -> RecordRef:
    try:
        num_prompt, num_response, reward = meta.split(b",")
        return RecordRef(
            key=key.decode(),
            group_id=group_id,
            num_prompt_tokens=int(num_prompt),
            num_response_tokens=int(num_response),
            reward=float(reward),
        )
    except ValueError as error:
        raise CodecError(f"stream entry of group {group_id!r} has unreadable metadata {meta!r} for {key!r}") from error
