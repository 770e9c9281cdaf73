"""The best possible eviction: Belady's rule in a cache that may also refuse a block. No policy can serve more."""

from collections.abc import Iterator
from heapq import heappop, heappush

from .prompt_blocks import NEVER, PromptBlocks


def optimum_hits(prompts: PromptBlocks, num_blocks: int) -> Iterator[int]:
    """Yield how many blocks each prompt hits where the cache always keeps the blocks that are used again soonest.

    A heap holds the next block event of every cached block, the latest first: later events, and deeper blocks of one
    prompt, are larger. Blocks never used again take no room. Only the first blocks of a prompt, its `active` ones,
    were there before or are used again.
    """
    is_cached = bytearray(prompts.num_distinct)
    block_of_event = prompts.blocks.tolist()
    next_event = prompts.next_event.tolist()
    heap: list[int] = []
    num_cached = end = 0
    for blocks, num_active in zip(prompts, prompts.active_counts.tolist(), strict=True):
        begin, end = end, end + len(blocks)
        active = blocks[:num_active]
        flags = bytes(map(is_cached.__getitem__, active))
        num_cached -= sum(flags)
        for event, block in zip(range(begin, end), active, strict=False):
            upcoming = next_event[event]
            is_cached[block] = upcoming != NEVER
            if upcoming != NEVER:
                num_cached += 1
                heappush(heap, -upcoming)
        while num_cached > num_blocks:
            event = -heappop(heap)
            if event >= end:  # otherwise the event is past, and the block has a later one in the heap
                is_cached[block_of_event[event]] = 0
                num_cached -= 1
        hits = flags.find(0)
        yield len(active) if hits < 0 else hits
