"""A shadow ledger's figures for Prometheus: vLLM's names where they mean what vLLM means by them, ours elsewhere."""

from collections.abc import Iterator

from ..backends.sinks.prometheus_endpoint import Figure
from ..backends.sinks.stream_order import StreamCounts
from .shadow_ledger import ShadowLedger


class ShadowMetrics:
    """Gives the figures of a shadow ledger and of the stream that it follows."""

    def __init__(self, ledger: ShadowLedger, counts: StreamCounts, block_size: int | None = None) -> None:
        """`block_size`: tokens a block; None: that of the latest stored block."""
        self._ledger = ledger
        self._counts = counts
        self._block_size = block_size

    def figures(self) -> Iterator[Figure]:
        """The figures now."""
        ledger, requests, counts = self._ledger, self._ledger.requests, self._counts
        size = self._block_size or requests.block_size
        looked_up = (requests.num_hit_blocks + requests.num_stored_blocks) * size
        seen = "as the stream of events shows it: requests that stored nothing are not seen."
        yield Figure("vllm:prefix_cache_queries", "counter", f"Tokens looked up, {seen}", looked_up)
        yield Figure("vllm:prefix_cache_hits", "counter", f"Tokens found, {seen}", requests.num_hit_blocks * size)
        pool = ledger.pool
        yield Figure("kvledger:shadow_blocks", "gauge", "Blocks that can be found.", pool.num_copies)
        occupancy = pool.num_copies / ledger.capacity if ledger.capacity else float("nan")
        yield Figure("kvledger:shadow_occupancy", "gauge", "Findable blocks over the pool's, 0 to 1.", occupancy)
        yield Figure("kvledger:shadow_blocks_stored", "counter", "Blocks that became findable.", pool.num_stored)
        yield Figure("kvledger:shadow_blocks_removed", "counter", "Blocks that were removed.", pool.num_removed)
        again = "Stored blocks that twice the memory would still have had."
        yield Figure("kvledger:shadow_blocks_twice_memory_saves", "counter", again, ledger.num_returned)
        yield Figure("kvledger:shadow_orphans", "counter", "Blocks stored behind one not there.", pool.num_orphans)
        yield Figure("kvledger:stream_batches", "counter", "Batches applied.", counts.applied)
        yield Figure("kvledger:stream_gaps", "counter", "Gaps found.", counts.gaps)
        yield Figure("kvledger:stream_unrecoverable", "counter", "Batches lost for good.", counts.unrecoverable)
        yield Figure("kvledger:stream_restarts", "counter", "New runs of the producer.", counts.restarts)
