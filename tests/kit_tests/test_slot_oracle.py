"""The definition that every other slot path is compared with."""

from kvledger.testing.slot_oracle import slot_of


def test_c05_slot_of_position_8_in_table_7_2_5() -> None:
    assert slot_of([7, 2, 5], 4, 8) == 20


def test_every_position_of_a_request_has_a_slot_of_its_own_inside_its_block() -> None:
    slots = [slot_of([7, 2, 5], 4, position) for position in range(12)]
    assert slots == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]


def test_context_ranks_share_a_block_in_stripes() -> None:
    """Blocks of 8 tokens, two ranks, stripes of 2: rank 0 holds 0 1 4 5, rank 1 holds 2 3 6 7."""
    by_rank = [[slot_of([3], 8, position, rank, 2, 2) for position in range(8)] for rank in (0, 1)]
    assert by_rank == [[12, 13, -1, -1, 14, 15, -1, -1], [-1, -1, 12, 13, -1, -1, 14, 15]]
