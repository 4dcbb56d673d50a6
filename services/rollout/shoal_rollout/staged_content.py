"""What a worker knows about the bytes in its staging buffer, from push to push.

A push that is given up between its writing and its commit leaves staging ahead of the live weights. The next push may then leave out
buckets that staging holds already, so what was staged but never committed is remembered: it must be swapped in with the next commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shoal.weights.verification import BucketKey, Expected, sent_parameters


class StagedContent:
    """Knowledge about one buffer. Starts like one that was just created: nothing is known, everything is to be swapped in."""

    def __init__(self, parameters: Iterable[str]) -> None:
        self._parameters = frozenset(parameters)
        self._uncommitted = self._parameters
        self._known: dict[BucketKey, int] = {}
        self._known_plan = ""
        self._is_complete = False
        self._writer = ""

    @property
    def is_complete(self) -> bool:
        """Whether every byte was verified and nothing may have written since."""
        return self._is_complete

    @property
    def is_open(self) -> bool:
        """Whether a push may be writing: bytes are not what they were, and not yet verified."""
        return bool(self._writer) and not self._is_complete

    @property
    def uncommitted(self) -> frozenset[str]:
        """Parameters whose staged values may differ from the live ones."""
        return self._uncommitted

    def known(self, plan_hash: str) -> Mapping[BucketKey, int]:
        """Verified digests of what staging held before the current push; those of another plan tell nothing about this one's buckets."""
        return self._known if plan_hash == self._known_plan else {}

    def begin(self, push_id: str) -> None:
        """A push may write from now on. Repeating it for the same push does nothing more."""
        if push_id != self._writer and not self._is_complete:
            self.forget()
        self._is_complete, self._writer = False, push_id

    def to_swap(self, expected: Sequence[Expected]) -> Collection[str]:
        """Note what the current push has written; answers the parameters that its commit must exchange."""
        self._uncommitted |= sent_parameters(expected)
        return self._uncommitted

    def verified(self, plan_hash: str, expected: Sequence[Expected]) -> None:
        """Every bucket was found right."""
        self._known = {one.key: one.xxh3 for one in expected}
        self._known_plan = plan_hash
        self._is_complete = True

    def end(self) -> None:
        """The current push is over, committed or not."""
        if not self._is_complete:
            self.forget()
        self._writer = ""

    def committed(self) -> None:
        """The live weights are the staged ones now."""
        self._uncommitted = frozenset()

    def forget(self) -> None:
        """Staging holds anything: a push broke off in it, or it is a new buffer."""
        self._known, self._known_plan = {}, ""
        self._uncommitted = self._parameters
        self._is_complete, self._writer = False, ""
