"""A request that found too few blocks, and what has to happen before another look can end otherwise."""

import attrs

from .allocator import KVCacheAllocator
from .events import Key
from .types import Request


@attrs.frozen
class RefusedAdmission:
    """What was so when the blocks did not suffice for a request.

    What counts for a request is how many blocks are free and how many of the blocks of its hit others hold. While the
    key behind the hit is not found, the sum of the two grows only by references that are given back, and by keys that
    are dropped from free blocks where another block under the key is held: whoever adopts a block of the hit takes it
    from the free ones, and so does whoever takes it for other content, even if a block under its key comes again. A
    block that is copied on write is one that others go on holding. All this is so where the hit names no block twice,
    and while the request stays what it was.

    Attributes:
        request: who was refused.
        next_key: of the block behind its hit.
        num_missing_blocks: how many more would have had to be free.
        num_gains: `LedgerState.num_gains` at the time.
        reserved_blocks: free blocks that were promised to others.
        use_watermark: whether the watermark had to stay free.
    """

    request: Request
    next_key: Key
    num_missing_blocks: int
    num_gains: int
    reserved_blocks: int
    use_watermark: bool

    def still_holds(
        self, allocator: KVCacheAllocator, request: Request, reserved_blocks: int, use_watermark: bool
    ) -> bool:
        """Whether this request would be refused again, so that it need not look."""
        return (
            self.request is request
            and allocator.state.num_gains - self.num_gains < self.num_missing_blocks
            and self.reserved_blocks <= reserved_blocks
            and self.use_watermark <= use_watermark
            and allocator.pool.find(self.next_key) is None
        )
