"""nano-vllm's `BlockManager` on our allocator: its scheduler is not changed.

    import nanovllm.engine.scheduler
    from kvledger.backends.engines.nano_vllm import LedgerBlockManager

    nanovllm.engine.scheduler.BlockManager = LedgerBlockManager

It brings other eviction policies (`functools.partial(LedgerBlockManager, eviction="s3fifo")`), sinks for every
decision, and errors instead of assertions.
"""

from collections.abc import Sequence
from typing import Protocol

from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.allocator.prefix_cache import PrefixMatch
from ...core.cache_kinds import FullAttention
from ...core.errors import MisuseError
from ...core.keys.block_hash import block_hasher
from ...core.keys.token_keys import TokenKeySource
from ...core.types import EventSink, Request

# nano-vllm's limits are those of its scheduler, so these only bound our tables.
_MAX_MODEL_LEN = 1 << 20
_MAX_NUM_REQS = 4096


class NanoSequence(Protocol):
    """What is read and written of nano-vllm's `Sequence`."""

    seq_id: int
    token_ids: list[int]
    num_cached_tokens: int
    block_table: list[int]

    def __len__(self) -> int:
        """Count the tokens of the prompt and of the output so far."""
        ...


class LedgerBlockManager:
    """The methods that nano-vllm's scheduler calls, on a `KVCacheAllocator`.

    Its blocks count from 0 and there is no null block, so block ids are one below the ledger's.

    Attributes:
        ledger: the allocator.
        block_size: tokens per block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, eviction: str = "lru", sinks: Sequence[EventSink] = ()
    ) -> None:
        """Create the pool.

        Args:
            num_blocks: blocks of the cache.
            block_size: tokens per block.
            eviction: name of the eviction policy.
            sinks: receive every commit.
        """
        config = AllocatorConfig(
            num_blocks=num_blocks + 1,
            groups=[FullAttention(block_size)],
            max_model_len=_MAX_MODEL_LEN,
            max_num_reqs=_MAX_NUM_REQS,
            eviction=eviction,
            key_algorithm="sha256",
        )
        self.block_size = block_size
        self.ledger = KVCacheAllocator(config, sinks)
        self._hasher = block_hasher("sha256")
        self._requests: dict[int, Request] = {}
        self._matches: dict[int, PrefixMatch] = {}

    def can_allocate(self, seq: NanoSequence) -> int:
        """Return how many cached blocks a waiting sequence would share; -1 if its blocks are not free."""
        request = self._request_of(seq)
        match = self._matches[seq.seq_id] = self.ledger.match_prefix(request)
        return match.num_hit_tokens // self.block_size if self.ledger.can_admit(request, match) else -1

    def allocate(self, seq: NanoSequence, num_cached_blocks: int) -> None:
        """Give a waiting sequence its blocks, the cached ones of `can_allocate` first.

        Raises:
            MisuseError: they are not free, or `can_allocate` was not asked.
        """
        match = self._matches.pop(seq.seq_id, None)
        if match is None or match.num_hit_tokens != num_cached_blocks * self.block_size:
            raise MisuseError(f"sequence {seq.seq_id}: ask can_allocate before allocate")
        request = self._request_of(seq)
        if self.ledger.allocate(request, len(seq) - match.num_hit_tokens, match) is None:
            raise MisuseError(f"sequence {seq.seq_id}: its blocks are not free; can_allocate says so")
        seq.num_cached_tokens = match.num_hit_tokens
        self._show_table(seq)

    def deallocate(self, seq: NanoSequence) -> None:
        """Give back what a sequence holds, because it has finished or is preempted."""
        name = str(seq.seq_id)
        if self.ledger.holds(name):
            self.ledger.free(name)
        self._requests.pop(seq.seq_id, None)
        self._matches.pop(seq.seq_id, None)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: NanoSequence) -> bool:
        """Whether a running sequence can get a slot for its newest token."""
        return self.ledger.num_free_blocks >= (len(seq) % self.block_size == 1)

    def may_append(self, seq: NanoSequence) -> None:
        """Give a running sequence a slot for its newest token.

        Raises:
            MisuseError: there is no free block; `can_append` says so.
        """
        if self.ledger.allocate(self._request_of(seq), 1) is None:
            raise MisuseError(f"sequence {seq.seq_id}: no free block; can_append says so")
        self._show_table(seq)

    def hash_blocks(self, seq: NanoSequence) -> None:
        """Do nothing: complete blocks are registered as they are allocated."""

    def _request_of(self, seq: NanoSequence) -> Request:
        request = self._requests.get(seq.seq_id)
        if request is None:
            keys = TokenKeySource(seq.token_ids, self._hasher, self.block_size)
            request = Request(str(seq.seq_id), len(seq), max_tokens=_MAX_MODEL_LEN - len(seq), keys=keys)
            self._requests[seq.seq_id] = request
        elif new := len(seq) - request.num_tokens:
            assert isinstance(request.keys, TokenKeySource)
            request.keys.append(seq.token_ids[-new:])
            request.num_output_tokens += new
        return request

    def _show_table(self, seq: NanoSequence) -> None:
        (blocks,) = self.ledger.block_ids(str(seq.seq_id))
        seq.block_table[:] = [block - 1 for block in blocks]
