"""B02: what is shared is found in whole blocks only; a block longer than the shared prefix finds nothing."""

import pytest
from kvledger.core import FullAttention
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.cache.reuse import ReuseAtBlockSize, shared_tokens
from kvledger.sim.traces import TraceInfo, TraceRequest, Window

SHARED = list(range(240))
FIRST, SECOND = [*SHARED, *range(1000, 1060)], [*SHARED, *range(2000, 2060)]


@pytest.mark.parametrize(
    ("block_size", "hit"), [(1, 240), (8, 240), (16, 240), (32, 224), (64, 192), (128, 128), (256, 0), (784, 0)]
)
def test_b02_hit_tokens_of_240_shared_tokens_by_block_size(ledger_of, block_size, hit) -> None:
    ledger = ledger_of(num_usable_blocks=700, block_size=block_size)
    ledger.serve("first", FIRST)
    assert ledger.serve("second", SECOND) == hit


def test_b02_groups_of_128_4096_32_2_and_8_can_only_hit_every_4096_tokens(ledger_of) -> None:
    groups = [FullAttention(size) for size in (128, 4096, 32, 2, 8)]
    ledger = ledger_of(num_usable_blocks=20_000, groups=groups)
    assert ledger.allocator.config.scheduler_block_size == 4096
    ledger.serve("short", range(2048))
    assert ledger.serve("short again", range(2048)) == 0
    ledger.serve("long", range(4100))
    assert ledger.serve("long again", range(4100)) == 4096


class TokenTrace:
    """Prompts whose every token is known, a second apart."""

    info = TraceInfo("list", None, "list", "s", 1, "given", 1.0, Window(0, None))

    def __init__(self, *prompts: list[int]) -> None:
        self._prompts = prompts

    def __iter__(self):
        for place, tokens in enumerate(self._prompts, 1):
            yield TraceRequest(float(place), len(tokens), 1, tuple(tokens), place)


def reuse_of(block_size: int, *prompts: list[int]) -> ReuseAtBlockSize:
    return shared_tokens(read_prompt_blocks(TokenTrace(*prompts))).at(block_size)


@pytest.mark.parametrize(("block_size", "near_misses"), [(16, 0), (128, 0), (256, 1), (784, 1)])
def test_b02_a_prefix_that_is_shared_but_below_one_block_is_counted_as_a_near_miss(block_size, near_misses) -> None:
    assert reuse_of(block_size, FIRST, SECOND).near_miss_requests == near_misses


def test_b02_no_shared_prefix_is_no_near_miss() -> None:
    reuse = reuse_of(256, list(range(300)), list(range(300, 600)))
    assert (reuse.hit_tokens, reuse.near_miss_requests) == (0, 0)
