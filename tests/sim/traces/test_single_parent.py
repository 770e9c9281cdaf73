"""One parent an id: what a plain walk over all ids would accept, name and remember."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.sim.traces.checks import SingleParentCheck
from kvledger.sim.traces.rows import RowError

# Dense ids, sparse ones, and both in one trace.
IDS = st.integers(0, 6) | st.sampled_from([10**6, 10**6 + 1, 10**9])
ROWS = st.lists(st.lists(IDS, max_size=5).map(tuple), max_size=12)


def first_contradiction(known: dict[int, int | None], row: tuple[int, ...]) -> int | None:
    """The position of the first id with another parent than before; the parents of the row enter `known` if none is."""
    seen, parent = dict(known), None
    for position, hash_id in enumerate(row):
        if seen.setdefault(hash_id, parent) != parent:
            return position
        parent = hash_id
    known.update(seen)
    return None


@given(rows=ROWS)
def test_a_row_is_refused_at_the_first_id_with_another_parent_and_then_leaves_no_trace(rows) -> None:
    refuses_at_contradictions(SingleParentCheck(), {}, rows)


def refuses_at_contradictions(check: SingleParentCheck, known: dict[int, int], rows: list[tuple[int, ...]]) -> None:
    for row in rows:
        position = first_contradiction(known, row)
        if position is None:
            check.add(row)
            continue
        with pytest.raises(RowError) as refusal:
            check.add(row)
        assert refusal.value.field == f"hash_ids[{position}]"


@given(groups=st.lists(ROWS, max_size=5))
def test_rows_taken_together_are_all_taken_only_where_none_is_refused_and_else_leave_no_trace(groups) -> None:
    check, known = SingleParentCheck(), {}
    for rows in groups:
        before = dict(known)
        are_right = all(first_contradiction(known, row) is None for row in rows)
        if check.add_all(rows):
            assert are_right
            continue
        known = before
        refuses_at_contradictions(check, known, rows)


def test_rows_of_dense_ids_are_taken_together() -> None:
    check = SingleParentCheck()
    assert check.add_all([(0, 1, 2), (), (0, 1, 3), (0, 1, 2, 4)])
    assert not check.add_all([(0, 5), (0, 6), (5,)])
    assert check.add_all([(6, 5)])


def test_a_prompt_that_goes_on_from_another_is_remembered_from_where_it_does() -> None:
    check = SingleParentCheck()
    check.add((0, 1, 2))
    check.add((0, 1, 3, 4))
    with pytest.raises(RowError, match="id 4 follows id 2 here and id 3 on an earlier line or position"):
        check.add((0, 1, 2, 4))
