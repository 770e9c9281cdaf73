"""vLLM's `KVCacheManager` on our allocator: the same calls, the same block ids, any eviction policy."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.prefix_cache import PrefixMatch
from ...core.errors import DoesNotFitError, InputError
from ...core.events import FreeReason, Key
from ...core.types import EventSink, Request
from .blocks import BlockObjects, LedgerBlocks
from .config import MANAGER, allocator_config, refuse
from .names import KVCacheManager, RequestStatus, scheduling, specs, utils
from .pool import Coordinator, GroupFacts, LedgerPool

_NEVER = 1 << 62


class BlockHashes:
    """A key source: the block hashes that vLLM's request computes."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def keys(self, start: int, stop: int) -> Sequence[Key]:
        """Return the hashes of the complete hash blocks `start <= i < stop`."""
        return self._request.block_hashes[start:stop]


@attrs.define
class Holder:
    """A request that holds blocks, and how far it can go before anything but the number of its tokens changes.

    Attributes:
        request: the request as the allocator knows it.
        row: its row of the block tables.
        capacity: tokens that its blocks have slots for.
        registers_at: known tokens at which a block of it becomes complete and has to be registered.
        releases_at: processed tokens at which a block of it goes out of window.
    """

    request: Request
    row: int
    capacity: int = 0
    registers_at: int = 0
    releases_at: int = 0


class LedgerManager(KVCacheManager):
    """Decides for vLLM's scheduler with a `KVCacheAllocator`, block id for block id as vLLM's own manager does.

    A decode step that needs no block only places a token, and nothing that vLLM asks for depends on that. With sinks
    such steps of all requests become one commit, at the latest when the next step begins; without any, a request's
    tokens are placed with its next block.

    Attributes:
        ledger: the allocator.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        *,
        eviction: str = "lru",
        max_num_reqs: int = 256,
        sinks: Sequence[EventSink] = (),
    ) -> None:
        """Take vLLM's arguments, the eviction policy's name, the most requests that hold blocks, and sinks.

        Raises:
            InputError: our allocator does not do what an argument asks for.
        """
        if metrics_collector is not None:
            refuse(MANAGER, ["vLLM's block residency metrics (--kv-cache-metrics)"])
        config = allocator_config(
            kv_cache_config,
            max_model_len,
            scheduler_block_size,
            hash_block_size,
            max_in_flight_tokens,
            enable_caching,
            use_eagle,
            watermark,
            max_num_reqs,
            eviction,
            enable_kv_cache_events,
        )
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = None
        self.prefix_cache_stats = scheduling.PrefixCacheStats() if log_stats else None
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(config.groups)
        self.watermark_blocks = config.watermark_blocks
        self.mamba_shared_prefix_checkpoint = False
        groups = kv_cache_config.kv_cache_groups
        self.kv_cache_event_metadata = tuple(
            [
                (
                    specs.get_kv_cache_spec_kind(group.kv_cache_spec).value,
                    specs.get_kv_cache_spec_sliding_window(group.kv_cache_spec),
                )
                for group in groups
            ]
        )
        self._objects = BlockObjects(utils.KVCacheBlock)
        self.empty_kv_cache_blocks = LedgerBlocks(((),) * len(groups), self._objects)
        self.block_pool = LedgerPool(config, enable_kv_cache_events, self._objects)
        if enable_kv_cache_events:
            sinks = [*sinks, self.block_pool]
        self.ledger = KVCacheAllocator(config, sinks)
        self.block_pool.state = self.ledger.state
        self.coordinator = Coordinator(
            [
                GroupFacts(kind.block_size, group.kv_cache_spec)
                for kind, group in zip(config.groups, groups, strict=True)
            ]
        )
        self._zeroed_groups = [
            number
            for number, group in enumerate(groups)
            if kv_cache_config.needs_kv_cache_zeroing and isinstance(group.kv_cache_spec, specs.AttentionSpec)
        ]
        self._new_block_ids: list[int] = []
        self._holders: dict[str, Holder] = {}
        self._has_sinks = bool(self.ledger.sinks)
        self._state_groups = [number for number, kind in enumerate(config.groups) if not kind.holds_tokens]
        self._states_of_step: set[tuple[int, Key]] = set()
        # Tokens to place: row, first position, count and known tokens; blocks to register: row and known tokens.
        self._to_place: list[tuple[int, int, int, int]] = []
        self._to_register: dict[int, int] = {}

    # -- questions ---------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Any) -> tuple[LedgerBlocks, int, int]:
        """Look up the longest cached prefix: its blocks, its tokens, and the boundary worth keeping (rule 14)."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        match = self.ledger.match_prefix(self._request_of(request))
        if not match.num_hit_tokens:
            return self.empty_kv_cache_blocks, 0, match.boundary
        if self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self.block_pool.report_hit(request, match)
        return LedgerBlocks(match.blocks, self._objects, match), match.num_hit_tokens, match.boundary

    def get_blocks(self, request_id: str) -> LedgerBlocks:
        """Return the blocks of a request."""
        holder = self._holders.get(request_id)
        if holder is None:
            return self.empty_kv_cache_blocks
        return LedgerBlocks([table.blocks(holder.row) for table in self.ledger.state.tables], self._objects)

    def create_kv_cache_blocks(self, blocks: Any) -> LedgerBlocks:
        """Return ids as blocks; the shared empty ones where there are none."""
        return LedgerBlocks(blocks, self._objects) if any(blocks) else self.empty_kv_cache_blocks

    def estimate_cached_tokens(self, request: Any) -> int:
        """Count the tokens up to the last block of the request that a lookup finds, in the group that has fewest."""
        holder = self._holders.get(request.request_id)
        if holder is None:
            return 0
        fewest = _NEVER
        for table in self.ledger.state.tables:
            blocks = table.rows[holder.row]
            found = (index + 1 for index in range(len(blocks) - 1, -1, -1) if self._is_keyed(blocks[index]))
            fewest = min(fewest, next(found, 0) * table.block_size)
        return fewest

    def _is_keyed(self, block: int) -> bool:
        return block > 0 and self.ledger.pool.key_of(block) is not None

    # -- commands ----------------------------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> LedgerBlocks | None:
        """Give a request slots for its next tokens; None if its blocks are not free now.

        Raises:
            InputError: tokens or blocks from outside the pool, which this manager refuses at start.
        """
        holder = self._holders.get(request.request_id)
        if holder is not None and not full_sequence_must_fit:
            start = request.num_computed_tokens
            end, known = start + num_new_tokens, request.num_tokens
            if end < known:
                known = end
            if (
                end + num_lookahead_tokens <= holder.capacity
                and known < holder.registers_at
                and start - request.num_in_flight_tokens < holder.releases_at
            ):
                if self._has_sinks:
                    self._to_place.append((holder.row, start, num_new_tokens, known))
                if self._state_groups:
                    self._note_state_of_prompt(request, holder.row, known)
                return self.empty_kv_cache_blocks
        if num_external_computed_tokens or delay_cache_blocks or num_encoder_tokens:
            raise InputError("kvledger's manager does not support tokens from outside the pool or encoder blocks")
        match: PrefixMatch | None = None
        if holder is not None:
            self._place(holder, request.num_computed_tokens)
            mine = self._updated(holder.request, request)
        else:
            mine = self._request_of(request)
            match = getattr(new_computed_blocks, "match", None)
            mine.cache_boundary = request.shared_prefix_boundary
            if match is not None and self._state_groups and self._hits_state_of_step(match):
                return None
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        use_watermark = has_scheduled_reqs and waits
        if full_sequence_must_fit and not self.ledger.can_admit(mine, match, use_watermark=use_watermark):
            return None
        start = None
        if holder is not None:
            start = request.num_computed_tokens
            self.remove_skipped_blocks(request.request_id, max(0, start - request.num_in_flight_tokens))
        self.block_pool.current = request
        try:
            taken = self.ledger.allocate(
                mine,
                num_new_tokens,
                match,
                num_computed_tokens=start,
                num_lookahead_tokens=num_lookahead_tokens,
                reserved_blocks=reserved_blocks,
                use_watermark=use_watermark,
            )
        except DoesNotFitError:  # vLLM lets such a request wait
            return None
        if taken is None:
            return None
        if holder is None:
            holder = self._holders[request.request_id] = Holder(mine, self.ledger.row_of(request.request_id))
            self.block_pool.request_in[holder.row] = request
        self._set_limits(holder)
        for group in self._zeroed_groups:
            self._new_block_ids += taken[group]
        if self._state_groups:
            known = min(self.ledger.state.placed[holder.row], request.num_tokens)
            self._note_state_of_prompt(request, holder.row, known)
        return LedgerBlocks(taken, self._objects) if any(taken) else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register the complete blocks among the first tokens, where they are not yet (asynchronous scheduling)."""
        holder = self._holders.get(request.request_id)
        if not self.enable_caching or holder is None:
            return
        if num_computed_tokens >= holder.registers_at:
            self._to_register[holder.row] = num_computed_tokens
            if self.enable_kv_cache_events:  # whose order is request by request
                self._catch_up()
        if self._state_groups:
            self._note_state_of_prompt(request, holder.row, num_computed_tokens)

    def free(self, request: Any) -> None:
        """Give back everything that a request holds."""
        if request.request_id not in self._holders:
            return
        self._catch_up()
        holder = self._holders.pop(request.request_id)
        self.ledger.free(request.request_id, reason_of(request))
        self.block_pool.request_in.pop(holder.row, None)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no later token attends to."""
        holder = self._holders.get(request_id)
        if holder is not None and processed_computed_tokens >= holder.releases_at:
            self._place(holder, processed_computed_tokens)
            self.ledger.release_out_of_window(request_id, processed_computed_tokens)
            self._set_limits(holder)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the keys of blocks."""
        self._catch_up()
        self.ledger.evict(list(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Drop every key, if no request holds blocks."""
        self._catch_up()
        held = self.ledger.pool.num_held_blocks
        if held:
            scheduling.logger.warning("The prefix cache is not reset: %d blocks are in use", held)
            return False
        self.ledger.reset_prefix_cache()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def new_step_starts(self) -> None:
        """Begin a step: the states that the last one left can be found now."""
        self._states_of_step.clear()
        self.ledger.begin_step()
        self._catch_up()

    def take_new_block_ids(self) -> list[int]:
        """Return the attention blocks taken since the last call, which the worker fills with zeros."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    # What follows is for KV connectors and for hits that end inside a block, which are refused at start.

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return nothing: no hit ends inside a block."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return nothing: there is no connector."""
        return {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """Return nothing: there is no connector."""
        return []

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Refuse: only connectors free blocks later."""
        raise InputError("kvledger's manager does not support deferred frees")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _request_of(self, request: Any) -> Request:
        mine = Request(
            request.request_id, request.num_prompt_tokens, max(request.max_tokens, 1), keys=BlockHashes(request)
        )
        return self._updated(mine, request)

    @staticmethod
    def _updated(mine: Request, request: Any) -> Request:
        mine.num_prompt_tokens = request.num_prompt_tokens  # a streaming session's prompt grows
        mine.num_output_tokens = request.num_tokens - request.num_prompt_tokens
        return mine

    def _place(self, holder: Holder, num_tokens: int) -> None:
        """Place the tokens of earlier steps, which have slots and fill no block that is not registered."""
        num_new = num_tokens - self.ledger.state.placed[holder.row]
        if num_new > 0:
            self.ledger.allocate(holder.request, num_new)

    def _catch_up(self) -> None:
        """Commit the tokens and registrations that were gathered."""
        if self._to_place:
            gathered, self._to_place = self._to_place, []
            rows, firsts, counts, known = np.array(gathered, dtype=np.int64).T.copy()
            self.ledger.append(rows, counts, first_positions=firsts, num_known_tokens=known)
        if self._to_register:
            due, self._to_register = self._to_register, {}
            for row in due:
                request = self.block_pool.request_in[row]
                self._updated(self._holders[request.request_id].request, request)
            self.ledger.register(np.array(list(due), dtype=np.int64), np.array(list(due.values()), dtype=np.int64))
            for row in due:
                self._set_limits(self._holders[self.block_pool.request_in[row].request_id])

    def _set_limits(self, holder: Holder) -> None:
        state, config, row = self.ledger.state, self.ledger.config, holder.row
        unit, behind = config.scheduler_block_size, config.use_eagle and len(config.groups) > 1
        capacity = releases_at = registers_at = _NEVER
        for group, kind in enumerate(config.groups):
            size = kind.block_size
            capacity = min(capacity, state.tables[group].count(row) * size)
            complete = (max(state.considered[group][row], 0) + 1) * size
            registers_at = min(registers_at, complete if behind else -(-complete // unit) * unit)
            needed = kind.computed_tokens_that_skip(np.asarray(state.skipped[group][row] + 1))
            if needed is not None:
                releases_at = min(releases_at, int(needed))
        holder.capacity = _NEVER if capacity >= config.max_model_len else capacity
        can_register = self.enable_caching and row not in state.outdated
        holder.registers_at = registers_at if can_register else _NEVER
        holder.releases_at = releases_at

    def _note_state_of_prompt(self, request: Any, row: int, known: int) -> None:
        """Note the state at the end of a prompt's last block while its request continues from it.

        In vLLM no other request can adopt it in a step in which its own request is scheduled.
        """
        unit = self.ledger.config.scheduler_block_size
        tokens = known // unit * unit
        last = request.num_prompt_tokens - (not self.use_eagle)
        boundary = max(last // unit * unit - unit * self.use_eagle, 0)
        if not tokens or tokens != boundary:
            return
        for group in self._state_groups:
            table = self.ledger.state.tables[group]
            index = -(-tokens // table.block_size) - 1
            block = table.block(row, index) if index < table.count(row) else 0
            if block and (key := self.ledger.pool.key_of(block)) is not None:
                self._states_of_step.add((group, key))

    def _hits_state_of_step(self, match: PrefixMatch) -> bool:
        return self.ledger.hits_state_of_this_step(match) or any(
            match.keys[group] and (group, match.keys[group][-1]) in self._states_of_step for group in self._state_groups
        )


def reason_of(request: Any) -> FreeReason:
    """Return why vLLM frees a request: it is still running where it is preempted."""
    if request.status == RequestStatus.FINISHED_ABORTED:
        return FreeReason.ABORTED
    return FreeReason.FINISHED if RequestStatus.is_finished(request.status) else FreeReason.PREEMPTED
