"""What holds between any two commands, each as a named object with a sentence. Needs no Hypothesis.

    check(allocator)                        # raises InvariantViolation: all of them
    check(allocator.state, [CONSERVATION])  # one alone
    for violation in violations(log.replay()): print(violation)

O(blocks + table entries) each, so a server can afford them at a sampling rate, and `kvledger log verify` runs them
over a log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np
from kvledger.core import CorruptLedgerError, EventLog, KVCacheAllocator, LedgerState
from kvledger.core.ledger.replay_checks import CheckedReplay
from kvledger.core.pool.eviction_order import EvictionOrder
from kvledger.testing.view import AllocatorView, view_of

Subject: TypeAlias = AllocatorView | LedgerState | KVCacheAllocator


class InvariantViolation(AssertionError):
    """A promise is broken.

    Attributes:
        name: the invariant's name.
        sentence: what it promises.
        detail: what was found instead.
    """

    def __init__(self, name: str, sentence: str, detail: str) -> None:
        super().__init__(f"{name}: {sentence}\n  found: {detail}")
        self.name, self.sentence, self.detail = name, sentence, detail


@attrs.frozen
class Invariant:
    """A promise about one state: `find` says what breaks it, or None. What a view does not tell is not checked."""

    name: str
    sentence: str
    find: Callable[[AllocatorView], str | None] = attrs.field(repr=False)

    def violation(self, view: AllocatorView) -> InvariantViolation | None:
        """The violation in this view, if there is one."""
        detail = self.find(view)
        return None if detail is None else InvariantViolation(self.name, self.sentence, detail)


def _some(blocks: Iterable[int]) -> str:
    ids = [int(block) for block in blocks]
    return ", ".join(map(str, ids[:6])) + (", ..." if len(ids) > 6 else "")


def _conservation(view: AllocatorView) -> str | None:
    held = int(np.count_nonzero(view.uses))
    free = len(view.free)
    total = held + free + view.num_null_blocks
    if total == view.num_blocks:
        return None
    keyed = view.keyed or {}
    evictable = sum([block in keyed for block in view.free.tolist()])
    kind = "a double free" if total > view.num_blocks else "a leak"
    if view.null_block is not None and view.null_block in view.free:
        kind += f"; the null block {view.null_block} is free (null_block=None says that there is none)"
    return (
        f"held {held} + evictable {evictable} + clean {free - evictable} + null {view.num_null_blocks} = {total}, not "
        f"{view.num_blocks}: {abs(total - view.num_blocks)} too {'many' if total > view.num_blocks else 'few'}, {kind}"
    )


def _ref_counts(view: AllocatorView) -> str | None:
    if view.ref_cnt is None:
        return None
    uses = view.uses
    wrong = np.flatnonzero(view.ref_cnt != uses)
    if view.null_block is not None:
        wrong = wrong[wrong != view.null_block]
    if not len(wrong):
        return None
    block = int(wrong[0])
    return f"block {block} has ref_cnt {int(view.ref_cnt[block])} but {int(uses[block])} table entries hold it"


def _queue(view: AllocatorView) -> str | None:
    free, num_blocks = view.free, view.num_blocks
    if len(free) and (int(free.min()) < 0 or int(free.max()) >= num_blocks):
        return f"the free queue holds {_some(free[(free < 0) | (free >= num_blocks)])}, which are no blocks"
    times = np.bincount(free, minlength=num_blocks)
    if (times > 1).any():
        return f"block {int(times.argmax())} is queued {int(times.max())} times"
    if view.null_block is not None and times[view.null_block]:
        return f"the null block {view.null_block} is queued"
    referenced = view.uses if view.ref_cnt is None else view.ref_cnt
    both = np.flatnonzero((times > 0) & (referenced != 0))
    if len(both):
        return f"block {_some(both)} is queued and referenced"
    neither = np.flatnonzero((times == 0) & (referenced == 0))
    if view.null_block is not None:
        neither = neither[neither != view.null_block]
    return f"block {_some(neither)} is neither queued nor referenced" if len(neither) else None


def _index(view: AllocatorView) -> str | None:
    if view.keyed is None or view.found is None:
        return None
    seen: set[int] = set()
    for (group, key), blocks in view.found.items():
        for block in blocks:
            if view.keyed.get(block) != (group, key):
                carries = view.keyed.get(block)
                return f"the index names block {block} under {key!r} of group {group}; it carries {carries!r}"
            if block in seen:
                return f"the index names block {block} twice"
            seen.add(block)
    missing = [block for block in view.keyed if block not in seen]
    return f"block {_some(missing)} carries a key that the index does not name" if missing else None


def _null_blocks(view: AllocatorView) -> str | None:
    if view.null_block is not None and view.ref_cnt is not None and view.ref_cnt[view.null_block] != 0:
        return f"the null block {view.null_block} has ref_cnt {int(view.ref_cnt[view.null_block])}"
    if view.null_block is not None and view.keyed is not None and view.null_block in view.keyed:
        return f"the null block {view.null_block} can be found"
    return None


def _one_group(view: AllocatorView) -> str | None:
    group_of: dict[int, int] = {}
    for groups in view.tables.values():
        for group, table in enumerate(groups):
            for block in table:
                if block != view.null_block and group_of.setdefault(block, group) != group:
                    return f"block {block} is held by group {group_of[block]} and by group {group}"
    return None


CONSERVATION = Invariant(
    "conservation", "held + evictable + clean + null == num_blocks, after every commit.", _conservation
)
# A request whose keys repeat finds one block at several places, and each of them counts.
REF_COUNTS = Invariant(
    "ref_counts", "A block's reference count is the number of table entries that hold it.", _ref_counts
)
QUEUED_IFF_UNREFERENCED = Invariant(
    "queued_iff_unreferenced",
    "A block is in the free queue, once, if and only if nothing references it; the null block never is.",
    _queue,
)
INDEX_POINTS_BOTH_WAYS = Invariant(
    "index_points_both_ways",
    "A block carries a key if and only if the index names the block under that key, once.",
    _index,
)
NULL_BLOCK_IS_NOBODYS = Invariant(
    "null_block_is_nobodys", "The null block is never referenced, and no lookup finds it.", _null_blocks
)
ONE_GROUP_PER_BLOCK = Invariant(
    "one_group_per_block", "A block holds the content of one group of layers only.", _one_group
)

INVARIANTS: tuple[Invariant, ...] = (
    CONSERVATION,
    REF_COUNTS,
    QUEUED_IFF_UNREFERENCED,
    INDEX_POINTS_BOTH_WAYS,
    NULL_BLOCK_IS_NOBODYS,
    ONE_GROUP_PER_BLOCK,
)


def _view(subject: Subject) -> AllocatorView:
    if isinstance(subject, KVCacheAllocator):
        subject = subject.state
    return view_of(subject) if isinstance(subject, LedgerState) else subject


def violations(subject: Subject, invariants: Sequence[Invariant] = INVARIANTS) -> Iterator[InvariantViolation]:
    """Every promise that the state breaks."""
    view = _view(subject)
    for invariant in invariants:
        violation = invariant.violation(view)
        if violation is not None:
            yield violation


def check(subject: Subject, invariants: Sequence[Invariant] = INVARIANTS) -> None:
    """Raise the first `InvariantViolation` of a state, if there is one. Changes nothing."""
    for violation in violations(subject, invariants):
        raise violation


def check_log(
    log: EventLog,
    invariants: Sequence[Invariant] = INVARIANTS,
    every: int = 1,
    eviction: EvictionOrder | None = None,
) -> LedgerState:
    """Replay a log and check the state after every `every`-th commit, and after the last. Returns the last state.

    Raises:
        CorruptLedgerError: names the commit after which a promise is broken.
    """
    replay = CheckedReplay(LedgerState(log.created, eviction))
    last = len(log) - 1
    for number, commit in enumerate(log):
        replay.apply(commit)
        if number % every and number != last:
            continue
        for violation in violations(replay.state, invariants):
            raise CorruptLedgerError(f"after commit {commit.sequence}: {violation}") from violation
    return replay.state
