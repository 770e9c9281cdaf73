"""Puts a stream that may lose, delay and repeat messages in order: each batch once, in sequence, or counted as lost.

It has no sockets: `KVEventSubscriber` feeds it the messages that arrive and asks for the missing ones.
"""

import zlib
from collections.abc import Callable
from typing import Final

import attrs

from ....core.errors import InputError
from .schema import KVEventBatch, decode_batch

# Payloads remembered, to distinguish a repeated message from a restarted producer.
REMEMBERED: Final = 10_000


@attrs.frozen
class Gap:
    """Missing batches `first .. last`, before a batch that has arrived."""

    first: int
    last: int


@attrs.define
class StreamCounts:
    """Counts of what happened to a stream."""

    applied: int = 0  # batches applied, each once
    duplicates: int = 0  # messages that repeated another, or came after a replay had replaced them
    gaps: int = 0  # gaps found
    replayed: int = 0  # batches that a replay brought
    unrecoverable: int = 0  # batches lost for good
    restarts: int = 0  # restarts of the producer
    snapshots: int = 0  # times the whole state was replaced by a snapshot
    undecodable: int = 0  # messages that were no batch; after each of them the view is cleared


class StreamOrder:
    """Puts a stream in order.

        order.offer(7, payload)             # 3 was the last: nothing is applied yet
        order.gap                           # Gap(4, 6)
        order.offer(4, ..), ..              # what a replay brings; 7 is applied after 6
        order.give_up()                     # if it brought nothing: clears, since removals may be lost

    Attributes:
        counts: what happened so far.
        expected: the next sequence number; None before the first message.
        first_error: what is wrong with the first message that could not be read; None if all could.
    """

    def __init__(
        self, apply: Callable[[int, KVEventBatch], None], clear: Callable[[], None], max_pending: int = 100_000
    ) -> None:
        """Start before the first message.

        Args:
            apply: called with each sequence number and batch, once and in order.
            clear: called when everything applied so far is void.
            max_pending: messages kept after a gap; with more, the gap is given up.
        """
        self._apply = apply
        self._clear = clear
        self._max_pending = max_pending
        self._pending: dict[int, bytes] = {}
        self._checksums: dict[int, int] = {}
        self._last_ts = float("-inf")
        self.counts = StreamCounts()
        self.expected: int | None = None
        self.first_error: str | None = None

    @property
    def gap(self) -> Gap | None:
        """The batches missing before the waiting messages; None if no message waits."""
        if not self._pending:
            return None
        return Gap(self.expected or 0, min(self._pending) - 1)

    @property
    def last_applied(self) -> int | None:
        """The batch before the expected one, if its payload is remembered."""
        last = (self.expected or 0) - 1
        return last if last in self._checksums else None

    def offer(self, sequence: int, payload: bytes, is_replay: bool = False) -> None:
        """Accept a message, live or from a replay."""
        if self.expected is None:
            self.expected = 0
        if sequence < self.expected:
            self._offer_old(sequence, payload, is_replay)
            return
        if sequence in self._pending:
            self.counts.duplicates += not is_replay
            return
        had_gap = bool(self._pending)
        self._pending[sequence] = payload
        self.counts.replayed += is_replay
        self._drain()
        if self._pending and not had_gap:
            self.counts.gaps += 1
        if len(self._pending) > self._max_pending:
            self.give_up()

    def reject(self, reason: str) -> None:
        """Count a message that cannot be read."""
        self.counts.undecodable += 1
        self.first_error = self.first_error or reason

    def matches(self, sequence: int, payload: bytes) -> bool:
        """Return whether this payload was applied under this number (True if that is no longer remembered)."""
        return self._checksums.get(sequence, zlib.crc32(payload)) == zlib.crc32(payload)

    def give_up(self) -> None:
        """Give up the gap: clear what was applied (removals may be lost) and continue after the gap."""
        gap = self.gap
        if gap is None:
            return
        self.counts.unrecoverable += gap.last - gap.first + 1
        self._clear()
        self.expected = gap.last + 1
        self._drain()

    def take_over(self, sequence: int, batches: list[KVEventBatch]) -> None:
        """Replace everything by a snapshot that includes the batches up to `sequence`."""
        self._clear()
        for batch in batches:
            self._apply(sequence, batch)
        self.counts.snapshots += 1
        self.expected = sequence + 1
        self._pending = {each: payload for each, payload in self._pending.items() if each > sequence}
        self._drain()

    def restart(self) -> None:
        """Start again from number 0, since the producer restarted: clear what was applied."""
        self.counts.restarts += 1
        self._clear()
        self._pending.clear()
        self._checksums.clear()
        self._last_ts = float("-inf")
        self.expected = 0

    def _offer_old(self, sequence: int, payload: bytes, is_replay: bool) -> None:
        """Handle a number below the expected one: a repeated or late message, or the first one of a new run."""
        remembered = self._checksums.get(sequence)
        if remembered is not None and remembered == zlib.crc32(payload):
            self.counts.duplicates += not is_replay
            return
        is_new_run = not is_replay and (remembered is not None or sequence == 0)
        if not is_new_run:
            batch = self._decoded(sequence, payload)
            if batch is None:
                return
            is_new_run = not is_replay and batch.ts > self._last_ts
        if is_new_run:
            self.restart()
            self.offer(sequence, payload)
        else:
            self.counts.duplicates += not is_replay

    def _drain(self) -> None:
        assert self.expected is not None
        while (payload := self._pending.pop(self.expected, None)) is not None:
            batch = self._decoded(self.expected, payload)
            if batch is None:
                self._clear()  # what it removed is unknown, as after a gap (field report E06)
            else:
                self._apply(self.expected, batch)
                self.counts.applied += 1
                self._last_ts = batch.ts
            self._checksums[self.expected] = zlib.crc32(payload)
            self._checksums.pop(self.expected - REMEMBERED, None)
            self.expected += 1

    def _decoded(self, sequence: int, payload: bytes) -> KVEventBatch | None:
        try:
            return decode_batch(payload)
        except InputError as error:
            self.reject(f"message {sequence}: {error}")
            return None
