"""Whatever breaks a rule is refused before anything has changed: the state and the log are as they were."""

from collections.abc import Callable

import numpy as np
import pytest
from kvledger.core import (
    AllocatorConfig,
    EventLog,
    FreeReason,
    FullAttention,
    InputError,
    KVCacheAllocator,
    MisuseError,
    Request,
    SlidingWindow,
)


class Numbered:
    """A key source that has the keys of `num_tokens` tokens and no more."""

    def __init__(self, name: str, num_tokens: int) -> None:
        self.name, self.num_blocks = name, num_tokens // 4

    def keys(self, start: int, stop: int) -> list[tuple[str, int]]:
        if stop > self.num_blocks:
            raise MisuseError(f"{self.name} has the keys of {self.num_blocks} blocks, not of {stop}")
        return [(self.name, i) for i in range(start, stop)]


def request_of(request_id: str, num_tokens: int, content: str | None = None) -> Request:
    return Request(request_id, num_tokens, max_tokens=64, keys=Numbered(content or request_id, num_tokens))


class Ledger:
    """Two requests in a pool of 8 blocks of 4: `a` holds 10 tokens in row 0, `gone` was freed."""

    def __init__(self, **config) -> None:
        self.log = EventLog()
        settings = {"groups": [FullAttention(4)], "max_model_len": 64, "max_num_reqs": 2} | config
        self.allocator = KVCacheAllocator(AllocatorConfig(num_blocks=9, **settings), [self.log])
        self.a = request_of("a", 10)
        assert self.allocator.allocate(self.a, 10) is not None
        assert self.allocator.allocate(request_of("gone", 4), 4) is not None
        self.allocator.free("gone")

    def refuses(self, error: type[Exception], match: str, command: Callable[[KVCacheAllocator], object]) -> None:
        state, length = self.allocator.state.snapshot(), len(self.log)
        with pytest.raises(error, match=match):
            command(self.allocator)
        assert self.allocator.state.snapshot() == state
        assert len(self.log) == length
        assert self.log.replay().snapshot() == state


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("error", "match", "command"),
    [
        pytest.param(MisuseError, "holds no blocks", lambda a: a.free("gone"), id="free twice"),
        pytest.param(MisuseError, "holds no blocks", lambda a: a.preempt("gone"), id="preempt what was freed"),
        pytest.param(MisuseError, "holds no blocks", lambda a: a.free("nobody"), id="free an unknown request"),
        pytest.param(MisuseError, "holds no blocks", lambda a: a.truncate("nobody", 0), id="truncate an unknown one"),
        pytest.param(MisuseError, "holds no blocks", lambda a: a.release_out_of_window("nobody"), id="release unknown"),
        pytest.param(MisuseError, "holds no blocks", lambda a: a.block_ids("nobody"), id="blocks of an unknown one"),
        pytest.param(
            MisuseError, "holds no blocks", lambda a: a.fork("gone", request_of("c", 4)), id="fork what was freed"
        ),
        pytest.param(
            MisuseError, "holds blocks already", lambda a: a.fork("a", request_of("a", 10)), id="fork into itself"
        ),
        pytest.param(
            InputError, "not out_of_window", lambda a: a.free("a", FreeReason.OUT_OF_WINDOW), id="free out of window"
        ),
        pytest.param(InputError, "not truncated", lambda a: a.free("a", FreeReason.TRUNCATED), id="free truncated"),
        pytest.param(MisuseError, "it has 10", lambda a: a.truncate("a", 11), id="truncate beyond the end"),
        pytest.param(MisuseError, "it has 10", lambda a: a.truncate("a", -1), id="truncate below 0"),
        pytest.param(MisuseError, "10 placed", lambda a: a.release_out_of_window("a", 11), id="release beyond the end"),
        pytest.param(MisuseError, "no block 99", lambda a: a.evict([1, 99]), id="evict an unknown block"),
        pytest.param(MisuseError, "no block -1", lambda a: a.evict([1, -1]), id="evict block -1"),
        pytest.param(MisuseError, "3 blocks in use", lambda a: a.reset_prefix_cache(), id="reset while in use"),
        pytest.param(MisuseError, "held by no request", lambda a: a.append(array(1)), id="append to a free row"),
        pytest.param(MisuseError, "named 2 times", lambda a: a.append(array(0, 0)), id="append to one row twice"),
        pytest.param(MisuseError, "no row -1", lambda a: a.append(array(-1)), id="append to row -1"),
        pytest.param(MisuseError, "no row 2", lambda a: a.append(array(2)), id="append to a row that is not there"),
        pytest.param(InputError, "at least 1, not 0", lambda a: a.append(array(0), 0), id="append nothing"),
        pytest.param(InputError, "at least 1, not -3", lambda a: a.append(array(0), array(-3)), id="append less"),
        pytest.param(InputError, "at least 1, not 0", lambda a: a.append_steps(array(0), 0), id="append no step"),
        pytest.param(InputError, "at least 1, not -1", lambda a: a.append_steps(array(0), -1), id="append steps back"),
        pytest.param(
            InputError, "leaves room for 54", lambda a: a.append_steps(array(0), 55), id="append steps beyond the end"
        ),
        pytest.param(
            InputError, "num_draft_tokens 2", lambda a: a.append(array(0), 1, num_draft_tokens=2), id="too many drafts"
        ),
        pytest.param(
            InputError, "below 0", lambda a: a.append(array(0), num_lookahead_tokens=-1), id="negative lookahead"
        ),
        pytest.param(
            MisuseError,
            "position 11: 10 tokens",
            lambda a: a.append(array(0), first_positions=array(11)),
            id="append behind a gap",
        ),
        pytest.param(
            MisuseError, "position -1", lambda a: a.append(array(0), first_positions=array(-1)), id="append before 0"
        ),
        pytest.param(
            MisuseError, "not of 3", lambda a: a.append(array(0), 4), id="append tokens that have no keys yet"
        ),
        pytest.param(
            InputError, "at least 1, not 0", lambda a: a.allocate(request_of("b", 4), 0), id="allocate nothing"
        ),
        pytest.param(
            InputError,
            "below 0",
            lambda a: a.allocate(request_of("b", 4), 4, num_lookahead_tokens=-2),
            id="allocate with negative lookahead",
        ),
        pytest.param(
            InputError,
            "below 0",
            lambda a: a.allocate(request_of("b", 4), 4, reserved_blocks=-2),
            id="allocate with negative reserve",
        ),
        pytest.param(
            MisuseError,
            "position 2: 0 tokens",
            lambda a: a.allocate(request_of("b", 4), 4, num_computed_tokens=2),
            id="allocate behind a gap",
        ),
    ],
)
def test_a_command_that_breaks_a_rule_changes_nothing(error, match, command) -> None:
    Ledger().refuses(error, match, command)


def test_steps_beyond_the_longest_request_are_refused_also_where_blocks_are_free() -> None:
    ledger = Ledger(max_model_len=12)
    ledger.a.keys = None
    assert ledger.allocator.could_append(array(0), 3)
    ledger.refuses(InputError, "leaves room for 2", lambda a: a.append_steps(array(0), 3))
    assert ledger.allocator.append_steps(array(0), 2) == (0, 0)


def test_steps_into_a_shared_block_are_refused_until_one_append_has_copied_it() -> None:
    ledger = Ledger()
    ledger.allocator.fork("a", Request("child", 10))
    child = array(ledger.allocator.row_of("child"))
    ledger.refuses(MisuseError, "others read its block .*; append one first", lambda a: a.append_steps(child, 2))
    assert ledger.allocator.append(child)
    assert ledger.allocator.block_ids("child")[0][-1] != ledger.allocator.block_ids("a")[0][-1]
    ledger.allocator.append_steps(child, 1)
    assert ledger.log.replay().snapshot() == ledger.allocator.state.snapshot()


def test_a_match_of_another_request_is_refused() -> None:
    ledger = Ledger()
    match = ledger.allocator.match_prefix(request_of("b", 9, content="a"))
    assert match.num_hit_tokens == 8
    ledger.refuses(MisuseError, "match of 'b'", lambda a: a.allocate(request_of("c", 9, content="a"), 1, match))


def test_a_match_for_a_request_that_holds_blocks_is_refused() -> None:
    ledger = Ledger()
    ledger.allocator.free("a")
    b = request_of("b", 9, content="a")
    match = ledger.allocator.match_prefix(b)
    assert ledger.allocator.allocate(b, 1, match) is not None
    ledger.refuses(MisuseError, "holds blocks already", lambda a: a.allocate(b, 1, match))


def test_a_match_whose_blocks_were_taken_is_refused_as_stale() -> None:
    ledger = Ledger()
    ledger.allocator.free("a")
    late = request_of("late", 9, content="a")
    match = ledger.allocator.match_prefix(late)
    assert ledger.allocator.allocate(request_of("quick", 32), 32) is not None
    ledger.allocator.free("quick")
    ledger.refuses(MisuseError, "stale match for 'late'", lambda a: a.allocate(late, 1, match))


def test_a_match_whose_blocks_are_untouched_is_good_however_much_else_has_happened() -> None:
    ledger = Ledger()
    late = request_of("late", 9, content="a")
    match = ledger.allocator.match_prefix(late)
    assert ledger.allocator.allocate(request_of("quick", 4), 4) is not None
    ledger.allocator.free("quick")
    assert ledger.allocator.allocate(late, 1, match) is not None
    assert ledger.allocator.block_ids("late")[0][:2] == ledger.allocator.block_ids("a")[0][:2]


def test_a_request_beyond_max_num_reqs_is_refused() -> None:
    ledger = Ledger()
    assert ledger.allocator.allocate(request_of("b", 4), 4) is not None
    ledger.refuses(MisuseError, "max_num_reqs", lambda a: a.allocate(request_of("c", 4), 4))
    ledger.refuses(MisuseError, "max_num_reqs", lambda a: a.fork("a", request_of("c", 10)))


def test_a_key_source_that_fails_leaves_the_command_undone() -> None:
    ledger = Ledger()
    broken = Request("b", 12, keys=Numbered("b", 8))
    ledger.refuses(MisuseError, "not of 3", lambda a: a.allocate(broken, 12))


@pytest.mark.parametrize("through", ["allocate", "append", "truncate"])
def test_going_back_behind_what_left_the_window_is_refused(through) -> None:
    ledger = Ledger(groups=[SlidingWindow(4, 5)], retention_interval=None)
    assert ledger.allocator.release_out_of_window("a") == 1
    commands = {
        "allocate": lambda a: a.allocate(ledger.a, 1, num_computed_tokens=7),
        "append": lambda a: a.append(array(0), first_positions=array(7)),
        "truncate": lambda a: a.truncate("a", 7),
    }
    ledger.refuses(MisuseError, "has released the first 4", commands[through])
    assert ledger.allocator.allocate(ledger.a, 1, num_computed_tokens=8) is not None
