"""Re-blocking: the ids of a trace as keys of engine blocks of any size."""

from hypothesis import given
from hypothesis import strategies as st
from kvledger.sim.engine.arrivals import TraceKeySource


def keys(ids, input_length, block_size, trace_block_size, ordinal=0, num_tokens=None):
    source = TraceKeySource(ids, input_length, ordinal, block_size, trace_block_size)
    return list(source.keys(0, (num_tokens or input_length) // block_size))


def test_a_full_trace_block_becomes_32_engine_blocks() -> None:
    assert len(keys((5, 6), 1024, 16, 512)) == 64
    assert keys((5, 6), 1024, 16, 512)[:32] == keys((5, 9), 1024, 16, 512)[:32]
    assert not set(keys((5, 6), 1024, 16, 512)[32:]) & set(keys((5, 9), 1024, 16, 512))


def test_equal_sizes_use_the_ids_themselves() -> None:
    assert keys((5, 6, 7), 1400, 512, 512) == [5, 6]


def test_larger_blocks_are_named_by_the_id_they_end_with() -> None:
    assert keys((1, 2, 3, 4, 5), 320, 128, 64) == keys((1, 2, 3, 4, 9), 320, 128, 64)
    assert keys((1, 2, 3, 4), 256, 128, 64)[0] == keys((1, 2, 8, 9), 256, 128, 64)[0]
    assert keys((1, 2, 3, 4), 256, 128, 64)[1] != keys((1, 2, 3, 9), 256, 128, 64)[1]


def test_a_partial_last_block_matches_the_same_length_only() -> None:
    assert keys((5, 6), 600, 16, 512)[32:] == keys((5, 6), 600, 16, 512, ordinal=1)[32:]
    assert not set(keys((5, 6), 600, 16, 512)[32:]) & set(keys((5, 6), 616, 16, 512)[32:])
    assert not set(keys((5, 6), 600, 16, 512)[32:]) & set(keys((5, 6), 1024, 16, 512)[32:])


def test_blocks_that_reach_into_the_output_are_unique_to_their_request() -> None:
    first, second = (keys((5,), 500, 16, 512, ordinal=n, num_tokens=640) for n in (0, 1))
    assert first[:31] == second[:31]
    assert not set(first[31:]) & set(second[31:])


def test_prompts_without_ids_share_nothing() -> None:
    assert not set(keys(None, 640, 16, None, ordinal=3)) & set(keys(None, 640, 16, None, ordinal=4))


prompts = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 23)), min_size=2, max_size=5)


@given(prompts=prompts, block_size=st.integers(1, 40), extra=st.integers(0, 60))
def test_two_blocks_share_a_key_exactly_if_they_end_in_the_same_place_of_the_same_content(
    prompts, block_size, extra
) -> None:
    """Content is a path in a tree of trace blocks of 24 tokens; a partial block is content of its own."""
    seen: dict[int, object] = {}
    for ordinal, (path, tail) in enumerate(prompts):
        ids, node = [], 0
        for choice in path:
            node = node * 2 + choice + 1
            ids.append(node)
        if tail:
            ids.append(1000 + node)
        length = 24 * len(path) + tail
        if not length:
            continue
        for i, key in enumerate(keys(tuple(ids), length, block_size, 24, ordinal, length + extra)):
            end = (i + 1) * block_size
            if end > length:
                content: object = ("unique", ordinal, end)
            elif end > 24 * len(path):
                content = ("partial", tuple(path), tail, end)
            else:
                content = ("full", tuple(path[: (end - 1) // 24 + 1]), end)
            assert seen.setdefault(key, content) == content
    assert len(set(map(repr, seen.values()))) == len(seen)
