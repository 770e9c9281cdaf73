"""Rows of block tables: what they hold, and what they refuse whole."""

import pytest
from kvledger.core.errors import MisuseError
from kvledger.core.pool.block_table import BlockTable


def test_rows_grow_change_and_shrink() -> None:
    table = BlockTable(max_num_reqs=3, max_num_blocks_per_req=3, block_size=4)
    table.extend(0, (7, 8))
    table.extend_each([0, 2], [9, 5])
    table.replace(0, [0, 1], 0)
    assert table.rows == [[0, 0, 9], [], [5]]
    assert table.num_blocks_per_row.tolist() == [3, 0, 1]
    assert table.block_of_each([0, 2], [2, 0]) == [9, 5]
    table.shrink(0, 1)
    table.clear(2)
    assert (table.blocks(0), table.blocks(2), table.num_blocks_per_row.tolist()) == ([0], [], [1, 0, 0])


def test_a_batch_with_a_full_row_changes_no_row() -> None:
    table = BlockTable(max_num_reqs=2, max_num_blocks_per_req=1, block_size=4)
    table.extend(1, (7,))
    with pytest.raises(MisuseError, match="row 1 would hold 2 blocks of 4; its table has 1 entries"):
        table.extend_each([0, 1], [8, 9])
    assert (table.blocks(0), table.blocks(1), table.num_blocks_per_row.tolist()) == ([], [7], [0, 1])
