"""A hit of chunked-local attention holds all that its next token attends to, wherever EAGLE or an alignment ends it."""

import pytest
from kvledger.core import ChunkedLocal

KEYS = list(range(12))


def found(chunk_size: int, cached: set[int], num_blocks: int, alignment: int = 4, drop_last: bool = False) -> list[int]:
    """Blocks of 4; block i + 1 is cached under key i for i in `cached`."""
    (hit,) = ChunkedLocal(4, chunk_size).find_hit(
        KEYS[:num_blocks], [{key: key + 1 for key in cached}], alignment, drop_last
    )
    return hit


def test_chunks_before_the_last_count_as_found() -> None:
    assert found(8, {2}, 3) == [0, 0, 3]
    assert found(8, set(), 3) == [0, 0]


def test_dropping_the_last_block_does_not_end_a_hit_in_a_chunk_that_was_not_looked_up() -> None:
    assert found(8, set(), 2, drop_last=True) == []
    assert found(8, {2}, 4, drop_last=True) == [0, 0]
    assert found(8, {2, 3}, 4, drop_last=True) == [0, 0]


@pytest.mark.parametrize(("cached", "hit"), [(set(), []), ({4}, []), ({4, 5}, [0, 0, 0, 0, 5, 6])], ids=str)
def test_an_alignment_does_not_end_a_hit_in_a_chunk_that_was_not_looked_up(cached, hit) -> None:
    assert found(16, cached, 6, alignment=12) == hit


def test_a_chunk_that_is_no_multiple_of_the_block_ends_no_hit_inside_itself() -> None:
    assert found(6, set(), 2) == []
    assert found(6, {1}, 2) == [0, 2]
