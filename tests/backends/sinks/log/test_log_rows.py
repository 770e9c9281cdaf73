"""Every event and every type of key comes back from its row exactly as it was."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.backends.sinks.log.keys import decode_key, encode_key
from kvledger.backends.sinks.log.row_codec import RowEncoder, records
from kvledger.backends.sinks.log.rows import ROW_SCHEMA, LoggedCommit, LoggedNote, RequestArrived, RunEnded
from kvledger.core.cache_kinds import ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from kvledger.core.errors import CorruptLedgerError, InputError
from kvledger.core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Commit,
    FreeReason,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)

KINDS = (FullAttention(16), CompressedState(16, 4), SlidingWindow(8, 24), ChunkedLocal(16, 64), SequenceState(16))
ONE_OF_EACH = Commit(
    0,
    (
        PoolCreated(9, KINDS, 4, 128, True, 8, 16, "lru", "sha256"),
        RowsAssigned(("a", "ü", ""), (0, 1, 2)),
        PrefixAdopted(1, 2, (0, 0, 5)),
        BlocksAllocated(0, (1, 2), (2, 1), (3, 4, 5), (None, b"\x00key", 7), (0, 2, 1)),
        BlocksAllocated(0, (1,), (1,), (6,)),
        BlocksAllocated(0, (1,), (2,), (6, 7), (b"\xff" * 32, None), ()),
        BlocksCached(2, (0, 1), (0, 4), (1, 6), (1, 0), (0,), (3,), (("t", 1, (2, b"3")),), (None, -5)),
        TokensPlaced(np.array([0, 1]), np.array([0, 1 << 40]), np.array([16, 1])),
        BlocksShared(0, 1, 3, (4, 0)),
        BlockCopied(0, 1, 2, 4, 7, "lost", 3),
        BlockCopied(1, 1, 2, 4, 7),
        *(BlocksFreed(reason, (0, 1), (2, 2), (1, 1), (3, 4), (1, 0)) for reason in FreeReason),
        BlocksFreed(FreeReason.FINISHED, (), (), (), ()),
        BlocksUncached((3,), (2**70,), (1,)),
        CacheReset(),
        RowsReleased(("a",), (0,)),
    ),
)

keys = st.recursive(
    st.integers() | st.binary() | st.text(), lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8
)


def through_rows(*commits: Commit) -> list[Commit]:
    encoder = RowEncoder()
    for commit in commits:
        encoder.add_commit(commit, None)
    return [record.commit for record in records([encoder.as_batch()]) if isinstance(record, LoggedCommit)]


def test_one_of_each_event_comes_back() -> None:
    assert through_rows(ONE_OF_EACH) == [ONE_OF_EACH]
    assert {type(event) for event in ONE_OF_EACH.events} == {
        *(PoolCreated, RowsAssigned, RowsReleased, PrefixAdopted, BlocksAllocated, BlocksCached, TokensPlaced),
        *(BlocksShared, BlockCopied, BlocksFreed, BlocksUncached, CacheReset),
    }


def test_commits_stay_apart_and_one_without_events_stays_a_commit() -> None:
    commits = [ONE_OF_EACH, Commit(1, ()), Commit(2, (CacheReset(), CacheReset())), Commit(3, (CacheReset(),))]
    assert through_rows(*commits) == commits


@pytest.mark.parametrize("pool", ["full", "hybrid"])
@pytest.mark.parametrize("keys", ["bytes", "int", "str", "tuple"])
def test_a_whole_history_comes_back(history_of: Callable, pool: str, keys: str) -> None:
    log = list(history_of(seed=3, num_commands=250, pool=pool, keys=keys).log)
    assert through_rows(*log) == log


@given(keys)
def test_every_key_comes_back_as_it_was(key) -> None:
    back = decode_key(encode_key(key))
    assert back == key
    assert type(back) is type(key)


@given(keys, keys)
def test_no_two_keys_share_an_encoding(one, other) -> None:
    assert (encode_key(one) == encode_key(other)) == (one == other)


@pytest.mark.parametrize("key", [1.5, None, frozenset({1}), True, (1, 2.0)])
def test_a_key_of_another_type_is_refused_and_leaves_the_batch_as_it_was(key) -> None:
    encoder = RowEncoder()
    encoder.add_commit(ONE_OF_EACH, 5)
    before = encoder.as_batch()
    bad = Commit(1, (CacheReset(), BlocksUncached((3, 4), (b"fine", key), (0, 0))))
    if key is None:
        encoder.add_commit(bad, 6)  # None is "no key", not a key
    else:
        with pytest.raises(InputError, match="which a log does not keep"):
            encoder.add_commit(bad, 6)
        assert encoder.as_batch().equals(before)


@pytest.mark.parametrize("rows", [(1 << 31,), np.array([1 << 31])])
def test_a_number_beyond_its_column_is_refused_and_leaves_the_batch_as_it_was(rows) -> None:
    encoder = RowEncoder()
    encoder.add_commit(ONE_OF_EACH, 5)
    before = encoder.as_batch()
    with pytest.raises(InputError, match="commit 1 holds a number too large for a log"):
        encoder.add_commit(Commit(1, (CacheReset(), TokensPlaced(rows, (0,), (1,)))), 6)
    assert encoder.as_batch().equals(before)


def test_notes_stand_between_commits_with_what_they_say() -> None:
    arrived = RequestArrived("r1", 0.1 + 0.2, 100, 20, (1, b"two", "three"), {"priority": 3, "text": "ä"})
    bare = RequestArrived("r2", 1e-9, 7)
    ended = RunEnded({"trace": {"name": "x", "rate": 1.5}, "none": None})
    encoder = RowEncoder()
    encoder.add_note(arrived, 5, 0)
    encoder.add_commit(Commit(0, ()), 6)
    encoder.add_note(bare, None, 1)
    encoder.add_note(ended, 7, 1)
    assert list(records([encoder.as_batch()])) == [
        LoggedNote(arrived, 5, 0),
        LoggedCommit(Commit(0, ()), 6),
        LoggedNote(bare, None, 1),
        LoggedNote(ended, 7, 1),
    ]


def test_an_event_of_a_later_version_is_named() -> None:
    encoder = RowEncoder()
    encoder.add_commit(Commit(4, (CacheReset(),)), None)
    batch = encoder.as_batch()
    renamed = batch.set_column(2, ROW_SCHEMA.field("event"), pa.array(["BlocksPainted"]))
    with pytest.raises(CorruptLedgerError, match="commit 4 holds 'BlocksPainted'"):
        list(records([renamed]))
