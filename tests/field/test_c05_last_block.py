"""C05: the arithmetic of the last block (blocks of 4), and the slot of a position."""

import numpy as np
import pytest
from kvledger.core import InputError
from kvledger.core.pool.block_table import BlockTable


@pytest.mark.parametrize(("num_tokens", "num_blocks", "in_last"), [(8, 2, 4), (9, 3, 1), (1, 1, 1), (4, 1, 4)])
def test_c05_blocks_of_a_request_and_tokens_in_its_last_one(ledger_of, num_tokens, num_blocks, in_last) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=4)
    ledger.admit(ledger.request("a", range(num_tokens)))
    assert len(ledger.table("a")) == num_blocks
    assert ledger.allocator.num_placed_tokens("a") - (num_blocks - 1) * 4 == in_last


def test_c05_no_tokens_take_no_blocks(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=4)
    table = ledger.allocator.state.tables[0]
    assert [places.tolist() for places in table.shortfall(np.array([0]), np.array([0]))] == [[], []]
    before = ledger.snapshot()
    with pytest.raises(InputError, match="at least 1"):
        ledger.allocator.allocate(ledger.request("a", range(4)), 0)
    assert ledger.snapshot() == before


def test_c05_slot_of_position_8_in_table_7_2_5(ledger_of) -> None:
    table = BlockTable(max_num_reqs=1, max_num_blocks_per_req=4, block_size=4)
    table.extend(0, [7, 2, 5])
    assert table.block(0, 8 // 4) * 4 + 8 % 4 == 20
