"""EAGLE with several groups: a hit is a multiple of every block size and leaves one more found block behind it.

The figures are those of vLLM 0.32's manager, run on the same two requests.
"""

import pytest
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request, SlidingWindow

SLIDING_7_FULL_32 = (SlidingWindow(4, 7), FullAttention(32))
FULL_8_FULL_4 = (FullAttention(8), FullAttention(4))
FULL_32_FULL_4 = (FullAttention(32), FullAttention(4))
SLIDING_7_FULL_4 = (SlidingWindow(4, 7), FullAttention(4))
SLIDING_20_FULL_8 = (SlidingWindow(4, 20), FullAttention(8))


class Prefixes:
    def __init__(self, tokens, hash_block_size: int) -> None:
        self.tokens, self.size = tokens, hash_block_size

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        return [tuple(self.tokens[: (i + 1) * self.size]) for i in range(start, stop)]


@pytest.mark.parametrize(
    ("groups", "num_tokens", "hit"),
    [
        (SLIDING_7_FULL_32, 33, 0),
        (SLIDING_7_FULL_32, 37, 0),
        (SLIDING_7_FULL_32, 64, 32),
        (SLIDING_7_FULL_32, 100, 32),
        (FULL_8_FULL_4, 33, 24),
        (FULL_8_FULL_4, 64, 56),
        (FULL_8_FULL_4, 65, 56),
        (FULL_8_FULL_4, 100, 80),
        (FULL_32_FULL_4, 64, 32),
        (SLIDING_7_FULL_4, 64, 60),
        (SLIDING_7_FULL_4, 65, 60),
        (SLIDING_7_FULL_4, 68, 64),
        (SLIDING_7_FULL_4, 100, 88),
        (SLIDING_20_FULL_8, 33, 24),
        (SLIDING_20_FULL_8, 64, 56),
        (SLIDING_20_FULL_8, 100, 80),
    ],
)
def test_hit_tokens_of_a_prompt_whose_first_95_tokens_are_cached(groups, num_tokens, hit) -> None:
    config = AllocatorConfig(num_blocks=200, groups=groups, max_model_len=320, use_eagle=True, retention_interval=None)
    allocator = KVCacheAllocator(config)
    cached = Request("a", 128, keys=Prefixes([0] * 128, config.hash_block_size))
    allocator.allocate(cached, 128)
    tokens = ([0] * 95 + [1] * 225)[:num_tokens]
    match = allocator.match_prefix(Request("b", num_tokens, keys=Prefixes(tokens, config.hash_block_size)))
    assert match.num_hit_tokens == hit
    assert [len(blocks) for blocks in match.blocks] == [hit // kind.block_size for kind in groups]
