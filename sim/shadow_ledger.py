"""The ledger of a server that is not ours, from its KV events alone: occupancy, churn, hits, and what more memory
would bring.

What a stream does not tell is not made up: it has no lookups, so a request that stores no block of its own leaves no
trace, and it does not say where one request ends and the next begins. The assumptions that fill this are in
`ASSUMPTIONS`, and every report states them.
"""

from collections import OrderedDict
from typing import Any

import attrs

from ..backends.sinks.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch
from ..backends.sinks.shadow_pool import FULL_ATTENTION, Address, ShadowPool
from ..backends.sinks.stream_order import StreamCounts
from .stream_requests import StreamRequests

ASSUMPTIONS = {
    "prefix_hit_rate": "blocks before the first one that a request stored, over those and all that it stored; requests "
    "that stored nothing are not seen, and blocks of output count as stored",
    "twice_memory": "stored blocks that had been evicted less than one pool of evictions before: LRU with twice the "
    "blocks would still have had them",
    "occupancy": "findable blocks, duplicates included; blocks without a key are not seen",
}


@attrs.define
class Interval:
    """Counts since the last report."""

    stored: int = 0
    removed: int = 0
    returned: int = 0
    first_ts: float | None = None
    last_ts: float | None = None


class ShadowLedger:
    """Follows a stream batch by batch, in order (`apply`), and forgets when the stream says so (`clear`).

    Attributes:
        pool: the index as the events describe it.
        requests: what the stream shows of requests.
        num_batches: batches taken in.
    """

    def __init__(self, num_gpu_blocks: int | None = None, continuation_s: float = 2.0) -> None:
        """Start before the first batch.

        Args:
            num_gpu_blocks: blocks of the server's pool, if known; else the most that were ever findable at once.
            continuation_s: a store right behind the last block of a sequence goes on with it if it comes within this
                time, and is a new request otherwise.
        """
        self._num_gpu_blocks = num_gpu_blocks
        self.pool = ShadowPool()
        self.requests = StreamRequests(self.pool, continuation_s)
        self.num_batches = 0
        self._peak = 0
        self._returned_of_requests = 0
        self._interval = Interval()
        self._total = Interval()
        self._evicted: OrderedDict[Address, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Blocks of the pool, as given or as seen."""
        return self._num_gpu_blocks - 1 if self._num_gpu_blocks else self._peak

    @property
    def last_ts(self) -> float | None:
        """The time of the latest batch."""
        return self._total.last_ts

    @property
    def num_returned(self) -> int:
        """Stored blocks that twice the memory would still have had."""
        return self._total.returned

    def apply(self, sequence: int, batch: KVEventBatch) -> None:
        """Take in one batch."""
        for counts in (self._interval, self._total):
            counts.first_ts = batch.ts if counts.first_ts is None else counts.first_ts
            counts.last_ts = batch.ts
        self.num_batches += 1
        # The lookup that found these missing came before the evictions that made room for them.
        returned = self._take_returned(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event, batch.ts, returned)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self._evicted.clear()
            self.pool.apply([event])
        self._peak = max(self._peak, self.pool.num_copies)

    def clear(self) -> None:
        """Nothing that was known counts any more (a gap, a new run of the producer)."""
        self.pool.clear()
        self.requests.forget()
        self._evicted.clear()

    def _take_returned(self, batch: KVEventBatch) -> set[Address]:
        """Blocks that this batch stores and that went within the last pool of evictions."""
        stored = [event for event in batch.events if isinstance(event, BlockStored)]
        addresses = [(event.group_idx or 0, hashed) for event in stored for hashed in event.block_hashes]
        returned = {address for address in addresses if address in self._evicted}
        for address in returned:
            del self._evicted[address]
        return returned

    def _stored(self, event: BlockStored, ts: float, returned: set[Address]) -> None:
        group = event.group_idx or 0
        again = returned.intersection([(group, hashed) for hashed in event.block_hashes])
        returned -= again
        for counts in (self._interval, self._total):
            counts.stored += len(event.block_hashes)
            counts.returned += len(again)
        if event.block_hashes and group == self.requests.group_of(event, FULL_ATTENTION):
            self._returned_of_requests += len(again)
            self.requests.stored(event, ts)

    def _removed(self, event: BlockRemoved) -> None:
        group = event.group_idx or 0
        for hashed in event.block_hashes:
            if self.pool.num_copies_of(hashed, group) == 1:
                self._evict((group, hashed))
        for counts in (self._interval, self._total):
            counts.removed += len(event.block_hashes)

    def _evict(self, address: tuple[int, BlockHash]) -> None:
        self._evicted[address] = None
        self._evicted.move_to_end(address)
        while len(self._evicted) > max(self.capacity, 1):
            self._evicted.popitem(last=False)

    # -- reports -----------------------------------------------------------------------------------------------------

    def report(self, counts: StreamCounts | None = None) -> dict[str, Any]:
        """The figures now, and since the last report; begins a new interval."""
        interval, self._interval = self._interval, Interval()
        seconds = _seconds(interval)
        total = self._total
        return {
            "ts": total.last_ts,
            "num_blocks": self.pool.num_copies,
            "num_keys": len(self.pool.blocks),
            "capacity_blocks": self.capacity or None,
            "occupancy": self.pool.num_copies / self.capacity if self.capacity else None,
            "stored": interval.stored,
            "removed": interval.removed,
            "stored_per_s": interval.stored / seconds if seconds else None,
            "removed_per_s": interval.removed / seconds if seconds else None,
            "requests": self.requests.num_requests,
            "hit_blocks": self.requests.num_hit_blocks,
            "prefix_hit_rate": self.requests.hit_rate,
            "twice_memory": {
                "blocks_not_computed_again": total.returned,
                "share_of_stored": total.returned / total.stored if total.stored else None,
                "prefix_hit_rate": self._hit_rate_with_twice(),
            },
            "orphans": self.pool.num_orphans,
            "unknown_removals": self.pool.num_unknown_removals,
            "stream": attrs.asdict(counts) if counts is not None else None,
        }

    def _hit_rate_with_twice(self) -> float | None:
        hits, stored = self.requests.num_hit_blocks, self.requests.num_stored_blocks
        if not hits + stored:
            return None
        return (hits + self._returned_of_requests) / (hits + stored)


def _seconds(interval: Interval) -> float:
    if interval.first_ts is None or interval.last_ts is None:
        return 0.0
    return interval.last_ts - interval.first_ts
