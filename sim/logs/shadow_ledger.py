"""Reconstructs the KV cache of another server from its KV events: occupancy, churn, hits, benefit of more memory.

The stream has no lookups, so a request that stores no block is invisible, and it does not mark where requests end.
`ASSUMPTIONS` lists how the reports fill these gaps.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import attrs

from ...backends.sinks.kv_events.schema import (
    GPU,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    UnknownEvent,
)
from ...backends.sinks.kv_events.shadow_pool import Address, ShadowPool
from ...backends.sinks.kv_events.stream_order import StreamCounts
from ...backends.sinks.metrics.endpoint import Figure
from ..figures import Document
from .stream_requests import StreamRequests

ASSUMPTIONS = {
    "prefix_hit_rate": "hit blocks over hit and stored blocks, where the blocks before a request's first stored one "
    "count as hits; requests that store nothing are invisible, and output blocks count as stored",
    "twice_memory": "stored blocks that were evicted less than one pool of evictions earlier, which LRU with twice the "
    "blocks would still have",
    "occupancy": "cached blocks of the GPU, including duplicates; blocks without a hash are invisible",
    "media": "only what the GPU stores makes a request; blocks copied back from another medium count as stored",
    "reuse": "with --kv-cache-report-mode full, blocks stored again from a first block on are a hit, even if the "
    "server computed them twice; without it, every stored block is a further copy",
    "unknown_events": "events of unknown types remove nothing; removals that cannot be read clear the view",
    "trace": "an orphan's row has the blocks that were seen; a request is left out if its blocks have several sizes "
    "(but for a shorter last one) or tokens that the stream does not tell",
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
    """The state of a server's KV cache, updated batch by batch (`apply`) and reset by `clear`.

    All figures but `blocks_by_medium` are those of the GPU.
    """

    def __init__(
        self, num_gpu_blocks: int | None = None, continuation_s: float = 2.0, reports_reuse: bool = False
    ) -> None:
        """Start before the first batch.

        Args:
            num_gpu_blocks: blocks of the server's pool, if known; else the most blocks cached at once so far.
            continuation_s: a store right after the last block of a request continues it if it comes within this time,
                and begins a request otherwise.
            reports_reuse: the server also reports the blocks that a request found, as stored.
        """
        self._num_gpu_blocks = num_gpu_blocks
        self.pool = ShadowPool(reports_reuse=reports_reuse)
        self.requests = StreamRequests(self.pool, continuation_s)
        self._peak = 0
        self._returned_of_requests = 0
        self._interval = Interval()
        self._total = Interval()
        self._evicted: OrderedDict[Address, None] = OrderedDict()
        self._sizes: dict[int, set[int]] = {}
        self._kinds: dict[int, str | None] = {}
        self.num_known_events = 0
        self.first_unknown: UnknownEvent | None = None

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
            self.num_known_events += not isinstance(event, UnknownEvent)
            if isinstance(event, BlockStored):
                if event.on_medium == GPU:
                    self._stored(event, batch.ts, returned)
            elif isinstance(event, BlockRemoved):
                if event.on_medium == GPU:
                    self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self._evicted.clear()
            else:
                self.first_unknown = self.first_unknown or event
                if event.may_remove:
                    self.clear()
            self.pool.apply([event])
        self._peak = max(self._peak, self.pool.copies_in[GPU])

    def clear(self) -> None:
        """Forget everything, because the stream has a gap or the producer restarted."""
        self.pool.clear()
        self.requests.forget()
        self._evicted.clear()

    def _take_returned(self, batch: KVEventBatch) -> set[Address]:
        """Blocks stored by this batch that were evicted within the last pool of evictions."""
        stored = [each for each in batch.events if isinstance(each, BlockStored) and each.on_medium == GPU]
        addresses = [(event.group_idx or 0, hashed) for event in stored for hashed in event.block_hashes]
        returned = {address for address in addresses if address in self._evicted}
        for address in returned:
            del self._evicted[address]
        return returned

    def _stored(self, event: BlockStored, ts: float, returned: set[Address]) -> None:
        group, gained = event.group_idx or 0, self.pool.gained(event)
        self._kinds[group] = event.kv_cache_spec_kind
        if event.block_hashes:
            self._sizes.setdefault(group, set()).add(event.block_size)
        again = returned.intersection([(group, hashed) for hashed in event.block_hashes])
        returned -= again
        for counts in (self._interval, self._total):
            counts.stored += len(gained)
            counts.returned += len(again)
        if self.requests.counts(event):
            self._returned_of_requests += len(again)
            self.requests.stored(event, ts, gained)

    def _removed(self, event: BlockRemoved) -> None:
        group = event.group_idx or 0
        for hashed in event.block_hashes:
            if self.pool.num_copies_of(hashed, group, GPU) == 1:
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
        num_blocks = self.pool.copies_in[GPU]
        with_twice = (requests.num_hit_blocks + self._returned_of_requests) / stored if stored else None
        return {
            "ts": total.last_ts,
            "num_blocks": num_blocks,
            "num_keys": sum(GPU in block.copies for block in self.pool.blocks.values()),
            "blocks_by_medium": {medium: count for medium, count in self.pool.copies_in.items() if count},
            "block_sizes": {str(group): sorted(sizes) for group, sizes in sorted(self._sizes.items())},
            "capacity_blocks": self.capacity or None,
            "occupancy": num_blocks / self.capacity if self.capacity else None,
            "stored": interval.stored,
            "removed": interval.removed,
            "stored_per_s": interval.stored / seconds if seconds else None,
            "removed_per_s": interval.removed / seconds if seconds else None,
            "requests": requests.num_requests,
            "hit_blocks": requests.num_hit_blocks,
            "hit_tokens": requests.num_hit_tokens,
            "stored_tokens": requests.num_stored_tokens,
            "prefix_hit_rate": requests.num_hit_blocks / stored if stored else None,
            "twice_memory": {
                "blocks_not_computed_again": total.returned,
                "share_of_stored": total.returned / total.stored if total.stored else None,
                "prefix_hit_rate": with_twice,
            },
            "orphans": self.pool.num_orphans,
            "unknown_removals": self.pool.num_unknown_removals,
            "unknown_events": dict(self.pool.unknown_events),
            "stream": attrs.asdict(counts) if counts is not None else None,
            "warnings": list(self._warnings()),
        }

    def _warnings(self) -> Iterator[str]:
        """What contradicts the stream or cannot be told from it."""
        if self._num_gpu_blocks and self._peak > self.capacity:
            yield (
                f"{self._peak:,} blocks were findable at once, but a pool of {self._num_gpu_blocks:,} blocks has "
                f"{self.capacity:,}: state the server's --num-gpu-blocks; if it reports reuse, add "
                "--kv-cache-report-mode full; otherwise removals were lost, or one block has several hashes"
            )
        if not self.requests.has_group and self._kinds:
            kinds = ", ".join(sorted({str(kind) for kind in self._kinds.values()}))
            yield f"no requests are told apart: all groups that stored blocks are of other kinds ({kinds})"
        if not self._kinds and any(self.pool.copies_in.values()):
            media = ", ".join(sorted(self.pool.copies_in))
            yield f"no requests are told apart: only other media than the GPU stored blocks ({media})"


class ShadowMetrics:
    """Prometheus figures of a shadow ledger and its stream, under vLLM's names where they mean the same."""

    def __init__(self, ledger: ShadowLedger, counts: StreamCounts) -> None:
        """Report on a ledger and the order of its stream."""
        self._ledger = ledger
        self._counts = counts

    def figures(self) -> Iterator[Figure]:
        """The figures now."""
        ledger, requests, counts = self._ledger, self._ledger.requests, self._counts
        looked_up = requests.num_hit_tokens + requests.num_stored_tokens
        seen = "as seen in the event stream, without requests that stored nothing."
        pool = ledger.pool
        num_blocks = pool.copies_in[GPU]
        occupancy = num_blocks / ledger.capacity if ledger.capacity else float("nan")
        illegible = pool.unknown_events.total()
        again = "Stored blocks that twice the memory would still have had."
        figures: tuple[tuple[str, Literal["counter", "gauge"], str, float], ...] = (
            ("vllm:prefix_cache_queries", "counter", f"Tokens looked up, {seen}", looked_up),
            ("vllm:prefix_cache_hits", "counter", f"Tokens found, {seen}", requests.num_hit_tokens),
            ("kvledger:shadow_blocks", "gauge", "Cached blocks of the GPU.", num_blocks),
            ("kvledger:shadow_occupancy", "gauge", "Cached blocks over the blocks of the pool, 0 to 1.", occupancy),
            ("kvledger:shadow_blocks_stored", "counter", "Blocks stored.", pool.num_stored),
            ("kvledger:shadow_blocks_removed", "counter", "Blocks removed.", pool.num_removed),
            ("kvledger:shadow_blocks_twice_memory_saves", "counter", again, ledger.num_returned),
            ("kvledger:shadow_orphans", "counter", "Blocks stored after an unknown parent.", pool.num_orphans),
            ("kvledger:shadow_unknown_events", "counter", "Events that could not be read.", illegible),
            ("kvledger:stream_undecodable", "counter", "Messages that could not be read.", counts.undecodable),
            ("kvledger:stream_batches", "counter", "Batches applied.", counts.applied),
            ("kvledger:stream_gaps", "counter", "Gaps found.", counts.gaps),
            ("kvledger:stream_unrecoverable", "counter", "Batches lost for good.", counts.unrecoverable),
            ("kvledger:stream_restarts", "counter", "Restarts of the producer.", counts.restarts),
        )
        yield from (Figure(*figure) for figure in figures)
