"""What vLLM reads of its block pool and its coordinator: how much is free, groups, and the KV events of our commits."""

from collections.abc import Sequence
from typing import Any

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.allocator.prefix_cache import PrefixMatch
from ...core.events import BlocksAllocated, BlocksCached, BlocksUncached, CacheReset, Commit, as_ints
from ...core.ledger.state import LedgerState
from .blocks import BlockObjects
from .names import AllBlocksCleared, BlockPool, utils


class LedgerPool(BlockPool):
    """Our pool under the name of vLLM's; as a sink it turns commits into vLLM's KV events.

    Attributes:
        state: the allocator's state.
        current: the request whose blocks are being allocated.
        request_in: row -> vLLM's request.
    """

    state: LedgerState

    def __init__(self, config: AllocatorConfig, enable_kv_cache_events: bool, objects: BlockObjects) -> None:
        self.num_gpu_blocks = config.num_blocks
        self.enable_caching = config.enable_caching
        self.hash_block_size = config.hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[Any] = []
        self.medium = "GPU"
        self.metrics_collector = None
        self.current: Any = None
        self.request_in: dict[int, Any] = {}
        self.null_block = objects[0]
        self._objects = objects
        self._block_sizes = [kind.block_size for kind in config.groups]

    def get_num_free_blocks(self) -> int:
        """Count the blocks that can be taken now."""
        return len(self.state.pool.free_queue)

    def get_usage(self) -> float:
        """Return the share of the blocks that requests hold, 0 to 1."""
        return self.state.pool.usage

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Do nothing: there are no blocks that only the scheduler holds."""

    @property
    def free_block_queue(self) -> "LedgerPool":
        """Return what stands for vLLM's free queue."""
        return self

    def get_all_free_blocks(self) -> list[Any]:
        """Return the free blocks as vLLM's objects, the one to be taken next first."""
        return [self._objects[block] for block in self.state.pool.free_queue.order()]

    # -- KV events ---------------------------------------------------------------------------------------------------

    def report_hit(self, request: Any, match: PrefixMatch) -> None:
        """Report the blocks of a hit as stored, for a request that asks for full reports."""
        for group, blocks in enumerate(match.blocks):
            if blocks:
                self.emit_cached_block_events(request, len(blocks), self._block_sizes[group], group)

    def apply(self, commit: Commit) -> None:
        """Queue the KV events of one commit."""
        for event in commit.events:
            if isinstance(event, BlocksAllocated):
                self._removed(event.lost_keys, event.lost_groups or (event.group,) * len(event.lost_keys))
            elif isinstance(event, BlocksUncached):
                self._removed(event.keys, as_ints(event.groups))
            elif isinstance(event, CacheReset):
                self.kv_event_queue.append(AllBlocksCleared())
            elif isinstance(event, BlocksCached):
                self._stored(event)

    def _removed(self, keys: Any, groups: Any) -> None:
        self._emit_block_removed_events(
            [
                utils.make_block_hash_with_group_id(key, group)
                for key, group in zip(keys, groups, strict=True)
                if key is not None
            ]
        )

    def _stored(self, event: BlocksCached) -> None:
        size, at = self._block_sizes[event.group], 0
        columns = (as_ints(column) for column in (event.rows, event.starts, event.stops, event.counts))
        indices = as_ints(event.indices)
        for (row, start, stop, count), parent in zip(zip(*columns, strict=True), event.parents, strict=True):
            request = self.request_in.get(row, self.current)
            extra_keys: list[Any] = []
            place = 0
            for index in indices[at : at + count]:
                keys, place = utils.generate_block_hash_extra_keys(request, index * size, (index + 1) * size, place)
                extra_keys.append(keys)
            self.kv_event_queue.append(
                self._build_block_stored_event(
                    request,
                    block_hashes=[utils.maybe_convert_block_hash(key) for key in event.keys[at : at + count]],
                    parent_block_hash=None if parent is None else utils.maybe_convert_block_hash(parent),
                    start_token_idx=start * size,
                    end_token_idx=stop * size,
                    block_size=size,
                    kv_cache_group_id=event.group,
                    extra_keys_list=extra_keys,
                )
            )
            at += count


@attrs.frozen
class GroupFacts:
    """What vLLM's scheduler reads of a group's manager."""

    block_size: int
    kv_cache_spec: Any


@attrs.frozen
class Coordinator:
    """What vLLM's scheduler reads of its coordinator."""

    single_type_managers: Sequence[GroupFacts]
    enable_partial_hash_hits: bool = False
