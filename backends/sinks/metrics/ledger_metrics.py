"""Counts the commits of a live allocator as figures for Prometheus, under vLLM's names."""

from collections.abc import Iterator

from ....core import events
from ....core.events import Commit, FreeReason, as_ints
from ....core.ledger.state import LedgerState
from .endpoint import Figure


class LedgerMetrics:
    """A sink that counts commits. It reads gauges from the live state when Prometheus scrapes.

    Commits do not tell queue lengths, latencies or tokens that were looked up without a hit: the scheduler does.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        """Start at 0. `state` may be set later, once the allocator exists."""
        self.state = state
        self._block_size = 0
        self._num_gpu_blocks = 0
        self._running = 0
        self._preemptions = 0
        self._finished: dict[str, int] = {}
        self._hit_tokens = 0
        self._taken = 0
        self._cached = 0
        self._evicted = 0

    def apply(self, commit: Commit) -> None:
        """Count one commit."""
        for event in commit.events:
            match event:
                case events.PrefixAdopted(group=0):
                    self._hit_tokens += len(event.blocks) * self._block_size
                case events.BlocksAllocated():
                    self._taken += sum(block > 0 for block in as_ints(event.blocks))
                    self._evicted += len(event.lost_keys) - event.lost_keys.count(None)
                case events.BlockCopied():
                    self._taken += 1
                    self._evicted += event.lost_key is not None
                case events.BlocksCached():
                    self._cached += len(event.keys)
                case events.BlocksUncached():
                    self._evicted += len(as_ints(event.blocks))
                case events.RowsAssigned():
                    self._running += len(event.requests)
                case events.RowsReleased():
                    self._running -= len(event.requests)
                    self._released(commit, len(event.requests))
                case events.PoolCreated():
                    self._block_size = event.groups[0].block_size
                    self._num_gpu_blocks = event.num_blocks
                case _:
                    pass

    def _released(self, commit: Commit, count: int) -> None:
        reasons = [event.reason for event in commit.events if isinstance(event, events.BlocksFreed)]
        reason = reasons[-1] if reasons else FreeReason.FINISHED
        if reason is FreeReason.PREEMPTED:
            self._preemptions += count
        else:
            name = "abort" if reason is FreeReason.ABORTED else "stop"
            self._finished[name] = self._finished.get(name, 0) + count

    def figures(self) -> Iterator[Figure]:
        """Yield the figures now."""
        usage = float("nan") if self.state is None else self.state.pool.usage
        yield Figure("vllm:kv_cache_usage_perc", "gauge", "Referenced blocks over usable blocks, 0 to 1.", usage)
        yield Figure("vllm:num_requests_running", "gauge", "Requests that hold blocks.", self._running)
        yield Figure("vllm:num_preemptions", "counter", "Requests that lost their blocks.", self._preemptions)
        hits = "Tokens found in the prefix cache, including readmissions after a preemption."
        yield Figure("vllm:prefix_cache_hits", "counter", hits, self._hit_tokens)
        for reason, count in sorted(self._finished.items()):
            ended = "Requests that ended and freed their blocks."
            yield Figure("vllm:request_success", "counter", ended, count, {"finished_reason": reason})
        yield Figure("kvledger:blocks_taken", "counter", "Blocks allocated for new content.", self._taken)
        yield Figure("kvledger:blocks_cached", "counter", "Blocks that entered the prefix cache.", self._cached)
        yield Figure("kvledger:blocks_evicted", "counter", "Blocks that lost their key.", self._evicted)
        info = {"block_size": str(self._block_size), "num_gpu_blocks": str(self._num_gpu_blocks)}
        yield Figure("vllm:cache_config_info", "gauge", "Block size and number of blocks of the pool.", 1, info)
