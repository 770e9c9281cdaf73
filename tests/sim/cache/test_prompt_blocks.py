"""Prompts in flat arrays: numbered as a walk over all of them would, whatever their ids look like."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.sim.cache import prompt_blocks
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.traces import TraceInfo, TraceRequest, Window

BLOCK_SIZE = 4
# Dense ids, sparse ones, and such as no 64-bit integer holds.
IDS = st.integers(0, 9) | st.sampled_from([-1, 10**6, 2**62, 2**63, 2**80])
PROMPTS = st.lists(st.none() | st.lists(IDS, max_size=4), max_size=10)


class ListTrace:
    """Prompts held in memory, at places that are no line numbers; None for one without ids, of 9 tokens."""

    info = TraceInfo("list", None, "list", "s", BLOCK_SIZE, "given", 1.0, Window(0, None))

    def __init__(self, prompts):
        self._prompts = prompts

    def __iter__(self):
        for place, ids in enumerate(self._prompts, start=100):
            if ids is None:
                yield TraceRequest(0.0, 9, 1, None, place)
            else:
                yield TraceRequest(0.0, BLOCK_SIZE * len(ids), 1, tuple(ids), place)


def walked(prompts) -> tuple[list[list[int]], int]:
    """Every prompt's numbers, and how many there are; `ValueError` with the index of one that contradicts the trie."""
    number: dict[object, int] = {}
    out: list[list[int]] = []
    for index, ids in enumerate(prompts):
        keys = [(index, i) for i in range(3)] if ids is None else list(ids)
        num_known = next((i for i, key in enumerate(keys) if key not in number), len(keys))
        fresh = keys[num_known:]
        if len(set(fresh)) < len(fresh) or not number.keys().isdisjoint(fresh):
            raise ValueError(index)
        out.append([number.setdefault(key, len(number)) for key in keys])
    return out, len(number)


@pytest.mark.parametrize("ids_at_once", [1, 5, 4_096])
@given(prompts=PROMPTS)
def test_blocks_are_numbered_in_the_order_in_which_they_first_appear(ids_at_once, prompts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_blocks, "IDS_AT_ONCE", ids_at_once)
        try:
            numbers, num_distinct = walked(prompts)
        except ValueError as error:
            with pytest.raises(InputError, match=rf"request {100 + error.args[0]}: one of its block ids was seen"):
                read_prompt_blocks(ListTrace(prompts))
            return
        read = read_prompt_blocks(ListTrace(prompts))
    assert list(read) == numbers
    assert read.num_distinct == num_distinct
