"""C02: held + evictable + clean + null == total, and a break is named: sign, amount, and the first commit."""

import pytest
from kvledger.core import Commit, CorruptLedgerError, EventLog, FreeReason
from kvledger.core.events import BlocksFreed, BlocksShared, RowsReleased
from kvledger.core.ledger.audit import Balance


def test_c02_4224_tokens_too_many_are_a_double_free_of_264_blocks_of_16() -> None:
    balance = Balance(total=3_185_200, held=0, evictable=325_120, clean=2_864_304, unit="tokens")
    assert (balance.difference, balance.kind) == (4_224, "double free")
    assert "4,224 tokens (264 blocks of 16) too many: a double free" in balance.describe(tokens_per_block=16)


def test_c02_59_tokens_missing_are_a_leak() -> None:
    balance = Balance(total=270_331, held=0, evictable=269_628, clean=644, unit="tokens")
    assert (balance.difference, balance.kind) == (-59, "leak")
    assert "59 tokens missing: a leak" in balance.describe()


def test_c02_a_sum_that_comes_out_is_no_fault() -> None:
    balance = Balance(total=100, held=30, evictable=50, clean=19, null=1)
    assert balance.kind is None
    assert balance.describe() == "held 30 + evictable 50 + clean 19 + null 1 == 100 blocks"


def history(ledger_of) -> list[Commit]:
    """Two requests that share two blocks, a fork, and everything given back."""
    ledger = ledger_of(num_usable_blocks=12, block_size=4)
    ledger.admit(ledger.request("a", range(10)))
    ledger.admit(ledger.request("b", range(11)))
    ledger.allocator.fork("b", ledger.request("child", range(11)))
    for request_id in ("a", "child", "b"):
        ledger.allocator.free(request_id)
    ledger.serve("c", range(100, 112))
    return list(ledger.log)


def first_free(commits: list[Commit]) -> int:
    return next(i for i, commit in enumerate(commits) if any(isinstance(e, BlocksFreed) for e in commit.events))


def edit(commits: list[Commit], sequence: int, events) -> EventLog:
    forged = list(commits)
    forged[sequence] = forged[sequence]._replace(events=tuple(events))
    return EventLog(forged)


def test_c02_an_honest_log_verifies(ledger_of) -> None:
    log = EventLog(history(ledger_of))
    assert log.conservation() is None
    assert log.verify().snapshot() == log.replay().snapshot()


def test_c02_a_block_left_out_of_a_free_is_a_leak_from_that_commit_on(ledger_of) -> None:
    commits = history(ledger_of)
    at = first_free(commits)
    freed, released = commits[at].events
    forged = freed._replace(blocks=freed.blocks[1:], counts=(len(freed.blocks) - 1,))
    log = edit(commits, at, [forged, released])
    fault = log.conservation()
    assert (fault.sequence, fault.balance.difference, fault.balance.kind) == (at, -1, "leak")
    assert fault.blocks == freed.blocks[:1]
    with pytest.raises(CorruptLedgerError, match=f"commit {at}: .* 1 blocks missing: a leak"):
        log.verify()


def test_c02_a_free_that_never_happened_is_a_leak_when_its_row_is_released(ledger_of) -> None:
    commits = history(ledger_of)
    at = next(i for i in range(len(commits) - 1, 0, -1) if isinstance(commits[i].events[-1], RowsReleased))
    freed, released = commits[at].events
    fault = edit(commits, at, [released]).conservation()
    assert (fault.sequence, fault.balance.difference) == (at, -len(freed.blocks))


def test_c02_a_block_freed_twice_is_a_double_free_of_one_block(ledger_of) -> None:
    commits = history(ledger_of)
    at = first_free(commits)
    freed, released = commits[at].events
    forged = freed._replace(blocks=(freed.blocks[0], *freed.blocks), counts=(len(freed.blocks) + 1,))
    fault = edit(commits, at, [forged, released]).conservation()
    assert (fault.sequence, fault.balance.difference, fault.balance.kind) == (at, 1, "double free")
    assert fault.blocks == freed.blocks[:1]


def test_c02_a_shared_block_freed_twice_breaks_the_sum_when_its_last_reference_is_gone(ledger_of) -> None:
    commits = history(ledger_of)
    at = first_free(commits)
    freed, released = commits[at].events
    shared = freed.blocks[-1]
    forged = freed._replace(blocks=(*freed.blocks, shared), counts=(len(freed.blocks) + 1,))
    fault = edit(commits, at, [forged, released]).conservation()
    assert fault.sequence == next(
        i
        for i in range(at + 1, len(commits))
        if any(isinstance(e, BlocksFreed) and shared in e.blocks for e in commits[i].events)
    )
    assert fault.balance.kind == "double free"


def test_c02_a_fork_that_is_missing_from_the_log_shows_when_the_child_gives_its_blocks_back(ledger_of) -> None:
    commits = history(ledger_of)
    at = next(i for i, c in enumerate(commits) if any(isinstance(e, BlocksShared) for e in c.events))
    log = edit(commits, at, [e for e in commits[at].events if not isinstance(e, BlocksShared)])
    fault = log.conservation()
    assert fault.balance.kind == "double free"
    with pytest.raises(CorruptLedgerError, match=f"commit {fault.sequence}: "):
        log.verify()


def test_c02_a_commit_that_is_missing_is_named(ledger_of) -> None:
    commits = history(ledger_of)
    del commits[3]
    with pytest.raises(CorruptLedgerError, match="commit"):
        EventLog(commits).verify()


def test_c02_a_log_that_takes_a_held_block_adds_up_but_cannot_be_applied(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=12, block_size=4)
    ledger.admit(ledger.request("a", range(4)))
    ledger.admit(ledger.request("b", range(50, 54)))
    commits = list(ledger.log)
    events = [e._replace(blocks=(1,)) if hasattr(e, "lost_keys") else e for e in commits[2].events]
    with pytest.raises(CorruptLedgerError, match="commit 2 cannot be applied: block 1 is taken while"):
        edit(commits, 2, events).verify()


def test_c02_a_log_that_names_a_block_which_does_not_exist_is_refused(ledger_of) -> None:
    commits = history(ledger_of)
    at = first_free(commits)
    forged = BlocksFreed(FreeReason.FINISHED, (0,), (0,), (1,), (99,))
    with pytest.raises(CorruptLedgerError, match="no block 99"):
        edit(commits, at, [forged]).verify()
