"""The free queue beside a plain list: whatever is queued, adopted and taken, both have the same order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.errors import MisuseError
from kvledger.core.pool.free_queue import FreeQueue

NUM_BLOCKS = 9
# What happens next, how many blocks it is about, and from where in the order they are chosen.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take interleaved", "remove", "append", "prepend"]),
        st.integers(1, 5),
        st.randoms(use_true_random=False),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_any_history_leaves_the_order_of_a_plain_list(steps) -> None:
    """Adopted blocks carry a key, so they are never among those without one, in front."""
    queue, plain = FreeQueue(NUM_BLOCKS), list(range(1, NUM_BLOCKS))
    away: list[int] = []
    unkeyed: set[int] = set()
    for what, count, random in steps:
        if what.startswith("take") or what == "remove":
            blocks = plain[: min(count, len(plain))]
            if what == "remove":
                keyed = [block for block in plain if block not in unkeyed]
                blocks = random.sample(keyed, min(count, len(keyed)))
                queue.remove(blocks)
            else:
                assert queue.peek(len(blocks)) == tuple(blocks)
                shares = [blocks] if what == "take" else [blocks[1::2], blocks[::2]]
                for share in shares:
                    queue.take(tuple(share))
            plain = [block for block in plain if block not in blocks]
            away += blocks
        else:
            blocks = random.sample(away, min(count, len(away)))
            away = [block for block in away if block not in blocks]
            if what == "append":
                queue.append(blocks)
                unkeyed.difference_update(blocks)
                plain = plain + blocks
            else:
                queue.prepend(blocks)
                unkeyed.update(blocks)
                plain = blocks + plain
        assert queue.order() == plain
        assert len(queue) == len(plain)
        assert queue.peek(len(plain)) == tuple(plain)


def test_a_block_that_comes_and_goes_a_thousand_times_leaves_no_trace() -> None:
    queue = FreeQueue(4)
    for _ in range(1_000):
        queue.remove([2])
        queue.append([2])
    assert queue.order() == [1, 3, 2]
    queue.take(queue.peek(3))
    assert queue.order() == []
    assert len(queue._line) <= queue._capacity


@pytest.mark.parametrize("num_in_front", [0, 3])
def test_many_blocks_are_removed_as_few_are(num_in_front: int) -> None:
    queue = FreeQueue(301)
    front = list(queue.peek(num_in_front))
    queue.take(tuple(front))
    queue.prepend(front[::-1])
    queue.remove(list(range(250, 300)))
    queue.append(list(range(250, 300)))
    gone = list(range(100, 299))
    queue.remove(gone)
    behind = [block for block in [*range(1, 250), 300, *range(250, 300)] if block not in (*gone, *front)]
    expected = [*front[::-1], *behind]
    assert queue.order() == expected
    assert queue.peek(50) == tuple(expected[:50])
    queue.append(gone)
    assert queue.order() == expected + gone


def test_more_blocks_than_are_queued_cannot_be_seen() -> None:
    queue = FreeQueue(4)
    with pytest.raises(MisuseError, match="4 blocks are asked for, but 3 are queued"):
        queue.peek(4)
    assert queue.order() == [1, 2, 3]
