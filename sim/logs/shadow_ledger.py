"""Reconstructs the KV cache of another server from its KV events: occupancy, churn, hits, benefit of more memory.

The stream has no lookups, so a request that stores no block is invisible, and it does not mark where requests end.
`ASSUMPTIONS` lists how the reports fill these gaps.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Literal

import attrs

from ...backends.sinks.kv_events.schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch
from ...backends.sinks.kv_events.shadow_pool import FULL_ATTENTION, Address, ShadowPool
from ...backends.sinks.kv_events.stream_order import StreamCounts
from ...backends.sinks.metrics.endpoint import Figure
from ..figures import Document


@attrs.define
class SeenRequest:
    """A request: the times of its first and latest store, and the hashes of its blocks, hits first."""

    arrival_s: float
    last_s: float
    chain: list[BlockHash]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of full blocks, of prompt and output together."""
        return len(self.chain) * self.block_size

    def row(self, numbers: dict[BlockHash, int], start_s: float) -> Document:
        """The row of a Mooncake trace with the stream's block size; output counts as prompt.

        Block hashes are numbered in the order of their first use.
        """
        return {
            "timestamp": (self.arrival_s - start_s) * 1e3,
            "input_length": self.num_tokens,
            "output_length": 1,
            "hash_ids": [numbers.setdefault(each, len(numbers)) for each in self.chain],
        }


class StreamRequests:
    """Separates the requests in a stream of stored blocks.

    Blocks stored right after the last block of a request continue it (a chunk of its prompt, or its output), if they
    come within `continuation_s`. Any other store begins a request, whose prefix hit is the chain before it.
    """

    def __init__(self, pool: ShadowPool, continuation_s: float) -> None:
        """`pool` gives prefixes before an event is applied to it; `ended` is called with each ended request."""
        self._pool = pool
        self._continuation_s = continuation_s
        self.ended: Callable[[SeenRequest], None] = lambda request: None
        self._by_tip: dict[BlockHash, SeenRequest] = {}
        self._group: int | None = None
        self.block_size = 0
        self.num_requests = 0
        self.num_hit_blocks = 0
        self.num_stored_blocks = 0

    def group_of(self, event: BlockStored, kind: str) -> int | None:
        """The group that separates requests: the first of this kind (or of unknown kind) that stores."""
        if self._group is None and event.kv_cache_spec_kind in (None, kind):
            self._group = event.group_idx or 0
        return self._group

    def stored(self, event: BlockStored, ts: float) -> None:
        """Apply one store of the group, before the pool does."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        self.num_stored_blocks += len(hashes)
        self.block_size = event.block_size
        sequence = self._by_tip.pop(parent, None) if parent is not None else None
        if sequence is not None and ts - sequence.last_s > self._continuation_s:
            self.ended(sequence)
            sequence = None
        if sequence is None:
            prefix = self._prefix(parent)
            self.num_requests += 1
            self.num_hit_blocks += len(prefix)
            sequence = SeenRequest(ts, ts, prefix, event.block_size)
        sequence.chain += hashes
        sequence.last_s = ts
        replaced = self._by_tip.pop(hashes[-1], None)
        if replaced is not None:
            self.ended(replaced)
        self._by_tip[hashes[-1]] = sequence
        self._end_old(ts)

    def forget(self) -> None:
        """End all current requests, because the stream was interrupted."""
        for sequence in self._by_tip.values():
            self.ended(sequence)
        self._by_tip.clear()

    def _prefix(self, parent: BlockHash | None) -> list[BlockHash]:
        chain: list[BlockHash] = []
        at = parent
        while at is not None and len(chain) < len(self._pool.blocks):
            block = self._pool.blocks.get((self._group or 0, at))
            if block is None:
                break
            chain.append(at)
            at = block.parent
        return chain[::-1]

    def _end_old(self, now: float) -> None:
        """End old requests; they are ordered by their latest store, so the old ones come first."""
        while self._by_tip:
            tip, sequence = next(iter(self._by_tip.items()))
            if now - sequence.last_s <= self._continuation_s:
                return
            del self._by_tip[tip]
            self.ended(sequence)


ASSUMPTIONS = {
    "prefix_hit_rate": "hit blocks over hit and stored blocks, where the blocks before a request's first stored one "
    "count as hits; requests that store nothing are invisible, and output blocks count as stored",
    "twice_memory": "stored blocks that were evicted less than one pool of evictions earlier, which LRU with twice the "
    "blocks would still have",
    "occupancy": "cached blocks, including duplicates; blocks without a hash are invisible",
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
    """The state of a server's KV cache, updated batch by batch (`apply`) and reset by `clear`."""

    def __init__(self, num_gpu_blocks: int | None = None, continuation_s: float = 2.0) -> None:
        """Start before the first batch.

        Args:
            num_gpu_blocks: blocks of the server's pool, if known; else the most blocks cached at once so far.
            continuation_s: a store right after the last block of a request continues it if it comes within this time,
                and begins a request otherwise.
        """
        self._num_gpu_blocks = num_gpu_blocks
        self.pool = ShadowPool()
        self.requests = StreamRequests(self.pool, continuation_s)
        self._peak = 0
        self._returned_of_requests = 0
        self._interval = Interval()
        self._total = Interval()
        self._evicted: OrderedDict[Address, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Blocks of the pool, given or observed."""
        return self._num_gpu_blocks - 1 if self._num_gpu_blocks else self._peak

    @property
    def last_ts(self) -> float | None:
        """The time of the latest batch."""
        return self._total.last_ts

    @property
    def num_returned(self) -> int:
        """Stored blocks that a cache with twice the memory would still have."""
        return self._total.returned

    def apply(self, sequence: int, batch: KVEventBatch) -> None:
        """Apply one batch."""
        for counts in (self._interval, self._total):
            counts.first_ts = batch.ts if counts.first_ts is None else counts.first_ts
            counts.last_ts = batch.ts
        # The lookup that missed these blocks came before the evictions that made room for them.
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
        """Forget everything, because the stream has a gap or the producer restarted."""
        self.pool.clear()
        self.requests.forget()
        self._evicted.clear()

    def _take_returned(self, batch: KVEventBatch) -> set[Address]:
        """Blocks stored by this batch that were evicted within the last pool of evictions."""
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

    def report(self, counts: StreamCounts | None = None) -> Document:
        """Current figures, and counts since the last report; begins a new interval."""
        interval, self._interval = self._interval, Interval()
        seconds = (interval.last_ts or 0.0) - (interval.first_ts or 0.0)
        total, requests = self._total, self.requests
        stored = requests.num_hit_blocks + requests.num_stored_blocks
        with_twice = (requests.num_hit_blocks + self._returned_of_requests) / stored if stored else None
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
            "requests": requests.num_requests,
            "hit_blocks": requests.num_hit_blocks,
            "prefix_hit_rate": requests.num_hit_blocks / stored if stored else None,
            "twice_memory": {
                "blocks_not_computed_again": total.returned,
                "share_of_stored": total.returned / total.stored if total.stored else None,
                "prefix_hit_rate": with_twice,
            },
            "orphans": self.pool.num_orphans,
            "unknown_removals": self.pool.num_unknown_removals,
            "stream": attrs.asdict(counts) if counts is not None else None,
        }


class ShadowMetrics:
    """Prometheus figures of a shadow ledger and its stream, under vLLM's names where they mean the same."""

    def __init__(self, ledger: ShadowLedger, counts: StreamCounts, block_size: int | None = None) -> None:
        """`block_size`: tokens per block; None: that of the latest stored block."""
        self._ledger = ledger
        self._counts = counts
        self._block_size = block_size

    def figures(self) -> Iterator[Figure]:
        """The figures now."""
        ledger, requests, counts = self._ledger, self._ledger.requests, self._counts
        size = self._block_size or requests.block_size
        looked_up = (requests.num_hit_blocks + requests.num_stored_blocks) * size
        seen = "as seen in the event stream, without requests that stored nothing."
        pool = ledger.pool
        occupancy = pool.num_copies / ledger.capacity if ledger.capacity else float("nan")
        again = "Stored blocks that twice the memory would still have had."
        figures: tuple[tuple[str, Literal["counter", "gauge"], str, float], ...] = (
            ("vllm:prefix_cache_queries", "counter", f"Tokens looked up, {seen}", looked_up),
            ("vllm:prefix_cache_hits", "counter", f"Tokens found, {seen}", requests.num_hit_blocks * size),
            ("kvledger:shadow_blocks", "gauge", "Cached blocks.", pool.num_copies),
            ("kvledger:shadow_occupancy", "gauge", "Cached blocks over the blocks of the pool, 0 to 1.", occupancy),
            ("kvledger:shadow_blocks_stored", "counter", "Blocks stored.", pool.num_stored),
            ("kvledger:shadow_blocks_removed", "counter", "Blocks removed.", pool.num_removed),
            ("kvledger:shadow_blocks_twice_memory_saves", "counter", again, ledger.num_returned),
            ("kvledger:shadow_orphans", "counter", "Blocks stored after an unknown parent.", pool.num_orphans),
            ("kvledger:stream_batches", "counter", "Batches applied.", counts.applied),
            ("kvledger:stream_gaps", "counter", "Gaps found.", counts.gaps),
            ("kvledger:stream_unrecoverable", "counter", "Batches lost for good.", counts.unrecoverable),
            ("kvledger:stream_restarts", "counter", "Restarts of the producer.", counts.restarts),
        )
        yield from (Figure(*figure) for figure in figures)
