"""Writing to the ledger: apply an event, close a commit, tell every sink; and reading what the ledger says."""

from collections.abc import Iterable

from .block_pool import BlockPool
from .errors import MisuseError
from .events import Commit, Event, PoolCreated
from .eviction import EvictionOrder
from .ledger_state import LedgerState
from .named_tuples import named_tuple
from .types import EventSink


class LedgerWriter:
    """A ledger that is being written: the state so far, and who hears of every commit.

    Attributes:
        state: the fold of every event so far.
        sinks: who hears of every commit, once, in order.
    """

    def __init__(self, created: PoolCreated, sinks: Iterable[EventSink], eviction: EvictionOrder | None) -> None:
        self.state = LedgerState(created, eviction)
        # The one way to change anything: a decided event is applied, and handed back for the commit.
        self._emit = self.state.apply
        self.sinks = tuple(sinks)
        self._commit([self._emit(created)])

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The block pool, to be read."""
        return self.state.pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be taken now, cached content included."""
        return len(self.state.pool.free_queue)

    def row_of(self, request_id: str) -> int:
        """The block-table row that a request holds."""
        row = self.state.row_of.get(request_id)
        if row is None:
            raise MisuseError(f"request {request_id!r} holds no blocks: it was never allocated, or freed already")
        return row

    def holds(self, request_id: str) -> bool:
        """Whether the request holds a row."""
        return request_id in self.state.row_of

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's blocks, by group and logical index."""
        row = self.row_of(request_id)
        return [table.blocks(row) for table in self.state.tables]

    def num_placed_tokens(self, request_id: str) -> int:
        """Tokens of the request that have slots."""
        return self.state.placed[self.row_of(request_id)]

    # -- the commit --------------------------------------------------------------------------------------------------

    def _commit(self, events: list[Event]) -> None:
        state = self.state
        commit = named_tuple(Commit, (state.next_sequence, tuple(events)))
        state.next_sequence += 1
        failure: Exception | None = None
        for sink in self.sinks:
            try:
                sink.apply(commit)
            except Exception as error:  # the commit stands; every sink hears of it before the first failure is raised
                failure = failure or error
        if failure is not None:
            raise failure
