"""B02: what is shared is found in whole blocks only; a block longer than the shared prefix finds nothing."""

import pytest
from kvledger.core import FullAttention

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
