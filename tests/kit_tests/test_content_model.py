"""The model of content: two sequences share a slot's content if and only if they are equal up to it."""

import pytest
from kvledger.testing import AllocatorView, ContentModel, GroupShape, Scenario
from kvledger.testing.content_model import Contents

SCENARIO = Scenario(num_blocks=9)


def view(**tables: list[int]) -> AllocatorView:
    return AllocatorView(num_blocks=9, tables={name: [table] for name, table in tables.items()}, free=[])


def test_content_is_the_whole_sequence_up_to_a_position() -> None:
    contents = Contents()
    assert contents.of([1, 2, 3])[:2] == contents.of([1, 2, 9])[:2]
    assert contents.of([1, 2, 3])[2] != contents.of([1, 2, 9])[2]
    assert contents.of([1, 2, 3])[2] != contents.of([2, 2, 3])[2]
    assert contents.without_last(contents.of([1, 2])[1]) == contents.of([1])[0]


def test_a_request_reads_what_it_wrote_and_what_is_equal_to_it() -> None:
    model = ContentModel(SCENARIO)
    tables = view(a=[1, 2], b=[1, 3])
    assert model.write("a", [1, 2, 3, 4, 5], 0, tables) is None
    assert model.write("b", [1, 2, 3, 4, 9], 4, tables) is None
    assert model.misread("a", [1, 2, 3, 4, 5], 5, tables) is None
    assert model.misread("b", [1, 2, 3, 4, 9], 5, tables) is None


def test_a_write_into_a_shared_block_is_a_misread_of_the_other_request() -> None:
    model = ContentModel(SCENARIO)
    tables = view(a=[1, 2], b=[1, 2])
    model.write("a", [1, 2, 3, 4, 5], 0, tables)
    model.write("b", [1, 2, 3, 4, 9], 4, tables)
    assert "reads block 2" in str(model.misread("a", [1, 2, 3, 4, 5], 5, tables))


def test_a_token_without_a_slot_and_one_in_the_null_block_are_named() -> None:
    model = ContentModel(SCENARIO)
    assert "no slot for position 4" in str(model.write("a", [1, 2, 3, 4, 5], 0, view(a=[1])))
    assert "null block" in str(model.write("a", [1, 2, 3, 4, 5], 0, view(a=[0, 1])))


@pytest.mark.parametrize(
    ("shape", "position", "first"),
    [
        (GroupShape("full", 4), 9, 0),
        (GroupShape("compressed", 4, 2), 9, 0),
        (GroupShape("sliding", 4, 3), 9, 7),
        (GroupShape("sliding", 4, 3), 1, 0),
        (GroupShape("sliding", 4, 1), 9, 9),
        (GroupShape("chunked", 4, 8), 9, 8),
        (GroupShape("chunked", 4, 8), 8, 8),
        (GroupShape("chunked", 4, 8), 7, 0),
        (GroupShape("state", 4), 9, 8),
    ],
)
def test_what_a_token_attends_to(shape, position, first) -> None:
    assert shape.attends_from(position) == first


def test_blocks_of_other_groups_hold_nothing_for_this_one() -> None:
    model = ContentModel(Scenario(num_blocks=9, groups=(GroupShape("full", 4), GroupShape("full", 4))))
    tables = AllocatorView(num_blocks=9, tables={"a": [[1], [2]]}, free=[])
    model.write("a", [1, 2, 3, 4], 0, tables)
    assert model.block_holds(1, 0, [1, 2, 3, 4])
    assert not model.block_holds(1, 1, [1, 2, 3, 4])
    swapped = AllocatorView(num_blocks=9, tables={"a": [[2], [1]]}, free=[])
    assert model.misread("a", [1, 2, 3, 4], 4, swapped) is not None


def test_a_copy_carries_the_content_along() -> None:
    model = ContentModel(SCENARIO)
    model.write("a", [1, 2, 3], 0, view(a=[1]))
    model.copy_on_write(view(a=[1], b=[1]), view(a=[1], b=[2]))
    assert model.misread("b", [1, 2, 3], 3, view(b=[2])) is None


def test_what_is_still_to_come_holds_nothing_although_the_block_held_the_same() -> None:
    model = ContentModel(SCENARIO)
    model.write("a", [1, 2, 3, 4], 0, view(a=[1]))
    assert model.block_holds(1, 0, [1, 2, 3, 4])
    model.expect("b", 0, 4, view(b=[1]))
    assert not model.block_holds(1, 0, [1, 2, 3, 4])
    model.write("b", [1, 2, 3, 4], 0, view(b=[1]))
    assert model.block_holds(1, 0, [1, 2, 3, 4])
