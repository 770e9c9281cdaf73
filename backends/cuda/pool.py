"""What a backend keeps on the device beside the cache: block tables, slots and the batch, at fixed addresses."""

from collections.abc import Sequence

import attrs
import torch

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError, MisuseError
from ...core.events import Commit, PoolCreated
from ...core.planner.layout import KVCacheConfig, block_table_width, needs_zeroing
from ...kernels.copy_blocks import BlockRegions
from ...kernels.slot_mapping import PADDING_SLOT, SlotTables
from ..context_rank import ContextRank
from .layout import LayerCache
from .memory import CacheMemory
from .tables import DeviceTables, TableEvents


@attrs.frozen(eq=False)
class DevicePool:
    """The tables of one pool.

    Attributes:
        tables: block tables of every group, on the host and on the device, and the prepared batch.
        events: brings the tables up to each commit.
        slot_tables: the device's tables as the slot kernel takes them.
        slots: int64 `[num_groups, max_num_batched_tokens]`, the slots of the prepared batch.
        block_sizes: tokens of one table entry, by group.
        holds_tokens: by group, whether it stores tokens (a state group does not).
        max_model_len: tokens of the longest request that the tables have room for.
    """

    tables: DeviceTables
    events: TableEvents
    slot_tables: SlotTables
    slots: torch.Tensor
    block_sizes: tuple[int, ...]
    holds_tokens: tuple[bool, ...]
    max_model_len: int

    @classmethod
    def of(
        cls,
        pool: PoolCreated | AllocatorConfig,
        config: KVCacheConfig,
        caches: Sequence[LayerCache],
        *,
        device: torch.device,
        context: ContextRank,
        max_num_batched_tokens: int,
    ) -> "DevicePool":
        """Empty tables for a pool.

        Args:
            pool: its groups, rows and longest request, which were checked against `config`.
            config: the plan of the cache.
            caches: of this rank's layers.
            device: where they are.
            context: which rank of decode context parallelism this is.
            max_num_batched_tokens: tokens of the largest step, padding included.
        """
        kinds = pool.groups
        widths = [block_table_width(-(-pool.max_model_len // kind.block_size), kind.block_size) for kind in kinds]
        pages = [
            [page for cache in caches if cache.group == group for page in cache.pages] for group in range(len(kinds))
        ]
        regions = [BlockRegions.of(group_pages) if group_pages else None for group_pages in pages]
        tables = DeviceTables(device, pool.max_num_reqs, widths, regions)
        block_sizes = tuple(kind.block_size for kind in kinds)
        holds_tokens = tuple(kind.holds_tokens for kind in kinds)
        slot_tables = SlotTables.of(
            tables.tables,
            block_sizes,
            context_rank=context.rank,
            context_size=context.size,
            interleave=context.interleave_tokens,
            sharded=holds_tokens,
        )
        slots = torch.full((len(kinds), max_num_batched_tokens), PADDING_SLOT, dtype=torch.int64, device=device)
        events = TableEvents(tables, needs_zeroing(config.groups))
        return cls(tables, events, slot_tables, slots, block_sizes, holds_tokens, pool.max_model_len)

    @property
    def max_num_reqs(self) -> int:
        """Rows of every table."""
        return self.tables.tables[0].shape[0]

    def check_serves(self, pool: PoolCreated) -> None:
        """Refuse a pool that these tables, made before it, do not fit.

        Raises:
            InputError: other rows, or another longest request.
        """
        mine, created = (self.max_num_reqs, self.max_model_len), (pool.max_num_reqs, pool.max_model_len)
        if mine != created:
            raise InputError(
                f"the tables were made for max_num_reqs {mine[0]} and max_model_len {mine[1]}, and the allocator has "
                f"{created[0]} and {created[1]}; make both from one AllocatorConfig"
            )


def check_pool(pool: PoolCreated | AllocatorConfig, config: KVCacheConfig, context: ContextRank) -> None:
    """Refuse a pool that is not the planned one.

    Raises:
        InputError: other blocks or groups, or blocks that do not divide into the stripes of context parallelism.
    """
    planned = [group.tokens_per_block(context.size) for group in config.groups]
    created = [kind.block_size for kind in pool.groups]
    if planned != created or config.num_blocks != pool.num_blocks:
        raise InputError(
            f"the allocator's pool has {pool.num_blocks} blocks and groups with blocks of {created} tokens; the "
            f"plan has {config.num_blocks} blocks and {planned} tokens; make both from one plan"
        )
    for kind in pool.groups:
        stripes = context.size * context.interleave_tokens
        if context.size > 1 and kind.holds_tokens and kind.block_size % stripes:
            raise InputError(
                f"blocks of {kind.block_size} tokens do not divide into stripes of "
                f"{context.interleave_tokens} on {context.size} ranks; use a multiple of {stripes}"
            )


# The pool that a backend follows: its tables, made when it is created or before, and brought up to each commit.


class FollowedPool:
    """One pool, of the plan that the memory was allocated for."""

    def __init__(
        self,
        memory: CacheMemory,
        device: torch.device,
        context: ContextRank,
        max_num_batched_tokens: int,
    ) -> None:
        """No pool yet.

        Args:
            memory: of the caches.
            device: where the tables are made.
            context: which rank of decode context parallelism this is.
            max_num_batched_tokens: tokens of the largest step, padding included.
        """
        self._memory = memory
        self._device = device
        self._context = context
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pool: DevicePool | None = None
        self._is_created = False
        self._next_sequence = 0

    @property
    def has_tables(self) -> bool:
        """Whether its tables are there."""
        return self._pool is not None

    @property
    def pool(self) -> DevicePool:
        """Its tables.

        Raises:
            MisuseError: there are none yet.
        """
        if self._pool is None:
            raise MisuseError("no pool yet: give the backend to the allocator as a sink")
        return self._pool

    def apply(self, commit: Commit) -> None:
        """Follow one commit on the host.

        Raises:
            MisuseError: a commit is missing or comes twice, or there is no memory yet.
            InputError: the pool is not the one that was planned.
        """
        if commit.sequence != self._next_sequence:
            raise MisuseError(
                f"commit {commit.sequence} came where {self._next_sequence} is next; commits come in order"
            )
        for event in commit.events:
            if isinstance(event, PoolCreated):
                self._create(event)
            else:
                self.pool.events.apply(event)
        self._next_sequence += 1

    def create_tables(self, pool: AllocatorConfig) -> None:
        """Make the tables before the pool is created.

        Args:
            pool: the configuration that its allocator will be made with.

        Raises:
            MisuseError: there is no memory yet, or there are tables already.
            InputError: the pool is not the one that was planned.
        """
        if self._pool is not None:
            raise MisuseError("this backend has its tables already; a backend serves one pool")
        self._make_tables(pool)

    def _create(self, event: PoolCreated) -> None:
        if self._is_created:
            raise MisuseError("a second pool was created; a backend serves one")
        if self._pool is None:
            self._make_tables(event)
        else:
            check_pool(event, self._memory.config, self._context)
            self._pool.check_serves(event)
        self._is_created = True

    def _make_tables(self, pool: PoolCreated | AllocatorConfig) -> None:
        config = self._memory.config
        check_pool(pool, config, self._context)
        self._pool = DevicePool.of(
            pool,
            config,
            self._memory.caches,
            device=self._device,
            context=self._context,
            max_num_batched_tokens=self._max_num_batched_tokens,
        )
