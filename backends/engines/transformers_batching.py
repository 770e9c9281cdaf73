"""The paged cache of transformers' continuous batching on our allocator.

    with ledger_cache(eviction="s3fifo"):
        outputs = model.generate_batch(prompts, ...)

For models with full attention only. Cached blocks count as free and are evicted one by one, when their memory is taken;
transformers' own cache gives all of them up as soon as memory runs short.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import InputError
from ...core.keys.block_hash import block_hasher
from ...core.keys.token_keys import TokenKeySource
from ...core.types import EventSink, Request

_API = "transformers.generation.continuous_batching.continuous_api"
# Limits of our tables; transformers has its own.
_MAX_MODEL_LEN = 1 << 20
_MAX_NUM_REQS = 4096


@contextmanager
def ledger_cache(eviction: str = "lru", sinks: Sequence[EventSink] = ()) -> Iterator[list[Any]]:
    """Let transformers make its paged caches on our allocator while the context lasts; yields those that it makes.

    Args:
        eviction: name of the eviction policy.
        sinks: receive every commit of every such cache.

    Raises:
        InputError: this version of transformers has another kind of paged cache.
    """
    api: Any = import_module(_API)
    theirs, made = api.PagedAttentionCache, []
    missing = [name for name in ("can_store_request_tokens", "evict_cached_blocks") if not hasattr(theirs, name)]
    if missing:
        raise InputError(
            "kvledger's paged cache is made for transformers 5.24; the PagedAttentionCache of the one installed has no "
            f"{', '.join(missing)}"
        )

    def make(*args: Any, **kwargs: Any) -> Any:
        cache = _class_on(theirs)(*args, **kwargs)
        cache.take_over(eviction, sinks)
        made.append(cache)
        return cache

    api.PagedAttentionCache = make
    try:
        yield made
    finally:
        api.PagedAttentionCache = theirs


class _LedgerPool:
    """What is read of transformers' `CachePool`: all free blocks, and no free sectors besides."""

    num_free_sectors = 0

    def __init__(self, ledger: KVCacheAllocator) -> None:
        self.free_sectors: list[int] = []
        self._ledger = ledger

    def count_free_blocks(self, index: int) -> int:
        return self._ledger.num_free_blocks

    def try_to_free_sectors(self) -> None:
        pass

    def reset(self) -> None:
        pass


def _class_on(paged_attention_cache: Any) -> Any:
    class LedgerPagedCache(paged_attention_cache):
        """transformers' `PagedAttentionCache` whose blocks our allocator gives.

        Attributes:
            ledger: the allocator. Its block 1 is the first block behind those that transformers keeps for padding.
            num_found_tokens: by request, the prompt tokens that its first lookup found in the cache.
        """

        ledger: KVCacheAllocator

        def take_over(self, eviction: str, sinks: Sequence[EventSink]) -> None:
            if list(self.cache_allocators) != ["full_attention"]:
                raise InputError(
                    f"kvledger's paged cache serves models with full attention only, not {list(self.cache_allocators)}"
                )
            self._blocks = self.cache_allocators["full_attention"]
            self._size: int = self._blocks.tokens_per_page
            self._first = 2 * self._blocks.blocks_per_sector - 1
            self._hasher = block_hasher("sha256")
            self._requests: dict[str, Request] = {}
            self.num_found_tokens: dict[str, int] = {}
            self.ledger = KVCacheAllocator(
                AllocatorConfig(
                    num_blocks=self._blocks.num_blocks + 1,
                    groups=[FullAttention(self._size)],
                    max_model_len=_MAX_MODEL_LEN,
                    max_num_reqs=_MAX_NUM_REQS,
                    enable_caching=self.use_prefix_sharing,
                    eviction=eviction,
                    key_algorithm="sha256",
                ),
                sinks,
            )
            self.pool = self._blocks.pool = _LedgerPool(self.ledger)

        def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
            """Find the longest cached prefix; the request holds its blocks from now on."""
            if not self.use_prefix_sharing:
                return 0
            request = self._request_of(request_id, prompt_ids)
            match = self.ledger.match_prefix(request)
            if match.num_hit_tokens:
                # A command of ours gives slots to a token at least; the next one of the request needs it anyway.
                if self.ledger.allocate(request, 1, match) is None:
                    return 0
                self._show_table(request_id)
            self.num_found_tokens.setdefault(request_id, match.num_hit_tokens)
            return match.num_hit_tokens

        def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
            """Give the request slots for its next tokens, if its blocks are free."""
            name, end = state.request_id, state.current_len() + request_len
            placed = self.ledger.num_placed_tokens(name) if self.ledger.holds(name) else 0
            if dry_run:
                held = len(self._blocks.block_table.get(name, ()))
                return -(-end // self._size) - held <= self.ledger.num_free_blocks
            request = self._request_of(name, state.initial_tokens)
            self._learn(request, state.initial_tokens + state.generated_tokens)
            if end > placed:
                if self.ledger.allocate(request, end - placed) is None:
                    return False
                self._show_table(name)
            return True

        def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
            """Give back what a request holds; its complete blocks can still be found."""
            if self.ledger.holds(request_id):
                self.ledger.free(request_id)
            self._requests.pop(request_id, None)
            self._blocks.block_table.pop(request_id, None)

        def free_all_requests(self, clear_ledgers: bool = False) -> None:
            """Give back what all requests hold, and forget the cached content if asked."""
            for request_id in list(self._requests):
                self.free_blocks(request_id)
            if clear_ledgers:
                self.ledger.reset_prefix_cache()

        def evict_cached_blocks(self) -> bool:
            """Do nothing: cached blocks are free."""
            return False

        def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
            """Return nothing: complete blocks are registered as they are allocated."""
            return {}

        def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copies: Any) -> list[str]:
            """Fork none: the further outputs of a prompt find its blocks as a prefix."""
            return []

        def _request_of(self, request_id: str, prompt_ids: list[int]) -> Request:
            request = self._requests.get(request_id)
            if request is None:
                keys = TokenKeySource(np.array(prompt_ids, dtype=np.int64), self._hasher, self._size)
                most = _MAX_MODEL_LEN - len(prompt_ids)
                request = self._requests[request_id] = Request(request_id, len(prompt_ids), most, keys)
            return request

        @staticmethod
        def _learn(request: Request, tokens: list[int]) -> None:
            new = tokens[request.num_tokens :]
            if new and isinstance(request.keys, TokenKeySource):
                request.keys.append(new)
                request.num_output_tokens += len(new)

        def _show_table(self, request_id: str) -> None:
            (blocks,) = self.ledger.block_ids(request_id)
            self._blocks.block_table[request_id] = [self._first + block for block in blocks]

    return LedgerPagedCache
