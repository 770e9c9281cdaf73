"""Where a token's keys and values belong, by the definition alone: the witness against every other slot path."""

from collections.abc import Sequence


def slot_of(
    table: Sequence[int], block_size: int, position: int, rank: int = 0, ranks: int = 1, stripe: int = 1
) -> int:
    """The slot of one position, or -1 where another rank of decode context parallelism holds it.

    A block id stands for `block_size` positions of the request. The ranks deal them out in stripes, each keeps its own
    in order, and numbers the slots of its own memory.
    """
    block, start = table[position // block_size], position // block_size * block_size
    mine = [p for p in range(start, start + block_size) if (p - start) // stripe % ranks == rank]
    return block * len(mine) + mine.index(position) if position in mine else -1
