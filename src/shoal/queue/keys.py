"""Names of everything that a run keeps in Redis; all start with `shoal:<run_id>:`."""

from __future__ import annotations

CONSUMER_GROUP = "trainer"
"""Consumer group of the experience stream, created at id 0 so that nothing added earlier is missed."""

CONSUMER = "coordinator"
"""A run has one consumer: a restarted coordinator finds its predecessor's pending entries under the same name."""

RECORD_FIELD = "record"
"""Hash field of a record's key that holds the ExperienceRecord bytes; other fields are columns."""


def run_prefix(run_id: str) -> str:
    """Prefix of every key of a run."""
    return f"shoal:{run_id}:"


def record_key(run_id: str, uid: str, sample_index: int, attempt: int) -> str:
    """Key of one sample's hash; (uid, sample_index, attempt) makes adding it idempotent."""
    return f"{run_prefix(run_id)}record:{uid}:{sample_index}:{attempt}"


def stream_key(run_id: str) -> str:
    """Key of the stream with one entry per group of records."""
    return f"{run_prefix(run_id)}groups"


def dead_letter_key(run_id: str) -> str:
    """Key of the stream of groups that were delivered too often without being acknowledged."""
    return f"{run_prefix(run_id)}dead_groups"
