"""The log in memory: append commits, rebuild the state from them, find the first commit that does not add up."""

from collections.abc import Iterator, Sequence

from .conservation import ConservationFault, first_conservation_fault
from .errors import CorruptLedgerError, KVLedgerError
from .events import Commit, PoolCreated
from .eviction import EvictionOrder
from .ledger_state import LedgerState


class EventLog:
    """A sink that keeps every commit.

        log = EventLog()
        allocator = KVCacheAllocator(config, sinks=[log])
        ...
        assert log.replay().snapshot() == allocator.state.snapshot()

    A log that is not wanted costs nothing: give the allocator no sink.
    """

    def __init__(self, commits: Sequence[Commit] = ()) -> None:
        self._commits = list(commits)

    def apply(self, commit: Commit) -> None:
        """Append one commit; its sequence number must be the next one."""
        if self._commits and commit.sequence != self._commits[-1].sequence + 1:
            raise CorruptLedgerError(f"commit {commit.sequence} follows commit {self._commits[-1].sequence}")
        self._commits.append(commit)

    def __len__(self) -> int:
        return len(self._commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._commits)

    def __getitem__(self, sequence: int) -> Commit:
        return self._commits[sequence]

    @property
    def created(self) -> PoolCreated:
        """The first event of the log."""
        first = self._commits[0].events[0] if self._commits and self._commits[0].events else None
        if not isinstance(first, PoolCreated):
            raise CorruptLedgerError("the log does not begin with PoolCreated, so there is no pool to rebuild")
        return first

    def replay(self, stop: int | None = None, eviction: EvictionOrder | None = None) -> LedgerState:
        """The state after commits `0 .. stop - 1` (all by default), rebuilt from nothing.

        Args:
            stop: how many commits to replay.
            eviction: an empty order like the live one, where its name does not suffice to make it (Belady).
        """
        state = LedgerState(self.created, eviction)
        for commit in self._commits[:stop]:
            state.apply_commit(commit)
        return state

    def conservation(self) -> ConservationFault | None:
        """The first commit after which held + evictable + clean + null != num_blocks, or None (field report C02).

        Works on logs that do not replay, too: it counts on its own, see `ConservationAudit`.
        """
        return first_conservation_fault(self.created, self._commits)

    def verify(self, eviction: EvictionOrder | None = None) -> LedgerState:
        """The state after the last commit, if every commit adds up and can be applied to what came before.

        Raises:
            CorruptLedgerError: names the first commit that does not, with sign and amount where blocks were lost or
                are there twice.
        """
        fault = self.conservation()
        if fault is not None:
            raise CorruptLedgerError(fault.describe())
        state = LedgerState(self.created, eviction)
        for commit in self._commits:
            try:
                state.apply_commit(commit)
            except (KVLedgerError, LookupError, ValueError) as error:
                raise CorruptLedgerError(f"commit {commit.sequence} cannot be applied: {error}") from error
        return state
