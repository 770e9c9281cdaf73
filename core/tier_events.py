"""What happens behind a pool: blocks that move between tiers. A log of its own, each commit caused by one of the pool.

The pool's ledger needs none of it: that a block lost its key, or that a key became findable, is said there already.
These events say what became of the content. State = fold(events) here too, down to the order in which tiers forget.
"""

from enum import StrEnum
from typing import TypeAlias

import attrs

from .events import Key

POOL = 0
"""The tier that the pool itself is; those behind it count from 1."""


class MoveReason(StrEnum):
    """Why content moved."""

    WRITTEN_BACK = "written_back"
    PROMOTED = "promoted"
    OVERFLOWED = "overflowed"
    SUPERSEDED = "superseded"
    CLEARED = "cleared"


@attrs.frozen
class TiersCreated:
    """The first event of a tier log: names and sizes in blocks, from the nearest to the farthest."""

    names: tuple[str, ...]
    num_blocks: tuple[int, ...]
    block_size: int


@attrs.frozen
class BlocksMoved:
    """Content, by its keys in the order of moving, went from one tier to another.

    `from_tier` and `to_tier` count from `POOL` = 0; `to_tier` None: the content is gone. It joins the end of the queue
    in which its new tier forgets.
    """

    reason: MoveReason
    keys: tuple[Key, ...]
    from_tier: int
    to_tier: int | None


TierEvent: TypeAlias = TiersCreated | BlocksMoved


@attrs.frozen
class TierCommit:
    """What one commit of the pool (`pool_sequence`) brought about behind it; `sequence` counts 0, 1, 2, ..."""

    sequence: int
    pool_sequence: int
    events: tuple[TierEvent, ...]
