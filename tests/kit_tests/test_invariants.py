"""Every invariant fires on a state that breaks it, alone and by name, and on no other."""

import subprocess
import sys
import time

import attrs
import numpy as np
import pytest
from kvledger.core import AllocatorConfig, CorruptLedgerError, EventLog, FullAttention, KVCacheAllocator, Request
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource
from kvledger.testing import INVARIANTS, AllocatorView, InvariantViolation, check, check_log, violations
from kvledger.testing.invariants import CONSERVATION

GOOD = AllocatorView(
    num_blocks=6,
    tables={"a": [[1, 2]], "b": [[1, 3]]},
    free=[4, 5],
    ref_cnt=[0, 2, 1, 1, 0, 0],
    keyed={1: (0, "k"), 4: (0, "k"), 2: (0, "m")},
    found={(0, "k"): (1, 4), (0, "m"): (2,)},
)

BROKEN: dict[str, tuple[AllocatorView, ...]] = {
    "conservation": (
        attrs.evolve(GOOD, free=[4], ref_cnt=None),
        attrs.evolve(GOOD, free=[4, 5, 5], ref_cnt=None),
    ),
    "ref_counts": (
        attrs.evolve(GOOD, ref_cnt=[0, 3, 1, 1, 0, 0]),
        attrs.evolve(GOOD, ref_cnt=[0, 2, 1, 1, 0, -1]),
        attrs.evolve(GOOD, tables={"a": [[1, 2, 1]], "b": [[1, 3]]}),
    ),
    "queued_iff_unreferenced": (
        attrs.evolve(GOOD, free=[4, 4]),
        attrs.evolve(GOOD, free=[4, 1]),
        attrs.evolve(GOOD, free=[4, 0]),
        attrs.evolve(GOOD, free=[4, 9]),
    ),
    "index_points_both_ways": (
        attrs.evolve(GOOD, keyed={1: (0, "k"), 2: (0, "m")}),
        attrs.evolve(GOOD, found={(0, "k"): (1, 4)}),
        attrs.evolve(GOOD, found={(0, "k"): (1, 4, 4), (0, "m"): (2,)}),
    ),
    "null_block_is_nobodys": (
        attrs.evolve(GOOD, ref_cnt=[1, 2, 1, 1, 0, 0]),
        attrs.evolve(GOOD, keyed={**(GOOD.keyed or {}), 0: (0, "n")}, found={**(GOOD.found or {}), (0, "n"): (0,)}),
    ),
    "one_group_per_block": (attrs.evolve(GOOD, tables={"a": [[1, 2], []], "b": [[], [1, 3]]}),),
}


def test_a_good_state_breaks_nothing() -> None:
    check(GOOD)
    assert list(violations(GOOD)) == []


def test_a_block_that_a_request_found_twice_breaks_nothing_while_each_place_counts() -> None:
    check(attrs.evolve(GOOD, tables={"a": [[1, 2, 1]], "b": [[3]]}))


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.name)
def test_an_invariant_fires_on_every_state_that_breaks_it(invariant) -> None:
    for view in BROKEN[invariant.name]:
        with pytest.raises(InvariantViolation) as violation:
            check(view, [invariant])
        assert violation.value.name == invariant.name
        assert invariant.sentence in str(violation.value)


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.name)
def test_what_a_manager_does_not_tell_is_not_checked(invariant) -> None:
    check(AllocatorView(num_blocks=6, tables=GOOD.tables, free=GOOD.free), [invariant])


def test_conservation_says_sign_and_amount() -> None:
    leak, double = (next(violations(view, [CONSERVATION])).detail for view in BROKEN["conservation"])
    assert "= 5, not 6: 1 too few, a leak" in leak
    assert "= 7, not 6: 1 too many, a double free" in double


def played_allocator(num_blocks: int, sinks=()) -> KVCacheAllocator:
    config = AllocatorConfig(num_blocks=num_blocks, groups=[FullAttention(16)], max_model_len=4_096, max_num_reqs=64)
    allocator = KVCacheAllocator(config, sinks)
    for i in range(64):
        source = TokenKeySource([i, *range(1_000)], block_hasher(), 16)
        request = Request(str(i), 1_001, keys=source)
        if allocator.allocate(request, 1_001) is not None and i % 2:
            allocator.free(str(i))
    return allocator


def test_checking_an_allocator_changes_nothing() -> None:
    allocator = played_allocator(2_000)
    before = allocator.state.snapshot()
    check(allocator)
    check(allocator.state)
    assert allocator.state.snapshot() == before


def test_a_check_of_10_000_blocks_is_cheap_enough_for_sampling() -> None:
    allocator = played_allocator(10_000)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        check(allocator)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


def test_a_log_is_checked_commit_by_commit() -> None:
    log = EventLog()
    allocator = played_allocator(2_000, [log])
    assert check_log(log).snapshot() == allocator.state.snapshot()
    assert check_log(log, every=10).snapshot() == allocator.state.snapshot()


def test_a_log_names_the_commit_after_which_a_promise_is_broken() -> None:
    log = EventLog()
    played_allocator(2_000, [log])
    commits = list(log)
    freeing = next(i for i, commit in enumerate(commits) if hasattr(commit.events[0], "reason"))
    freed, released = commits[freeing].events
    forged = freed._replace(blocks=freed.blocks[1:], counts=(len(freed.blocks) - 1,))
    commits[freeing] = commits[freeing]._replace(events=(forged, released))
    with pytest.raises(CorruptLedgerError, match=f"after commit {freeing}: conservation"):
        check_log(EventLog(commits))


def test_the_kit_without_its_strategies_needs_no_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from kvledger.testing import INVARIANTS, check, explore, make_ledger\n"
        "print(explore(make_ledger, 2).commands > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_uses_counts_every_table_entry_but_the_null_block() -> None:
    view = attrs.evolve(GOOD, tables={"a": [[0, 2]], "b": [[2, 3]]})
    assert np.array_equal(view.uses, [0, 0, 2, 1, 0, 0])


def test_every_invariant_has_a_broken_state_here() -> None:
    assert set(BROKEN) == {invariant.name for invariant in INVARIANTS}
