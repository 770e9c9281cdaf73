"""The pool that a backend follows: its tables, made when it is created or before, and brought up to each commit."""

import torch

from ..core.allocator_config import AllocatorConfig
from ..core.errors import MisuseError
from ..core.events import Commit, PoolCreated
from .cache_memory import CacheMemory
from .context_rank import ContextRank
from .device_pool import DevicePool, check_pool


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
