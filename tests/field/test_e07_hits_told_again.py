"""E07: a server may report the blocks that a request found as stored again, without a further copy (vllm#50118)."""

import pytest

from tests.field.kv_streams import removed_map, stored_map

FULL = ("--num-gpu-blocks", "9", "--kv-cache-report-mode", "full")
EVICTED = (20.0, [removed_map([3]), removed_map([2]), removed_map([1])])


def reuse(session: str | None = "b"):
    """A prompt; then a request that finds its blocks, which the server tells again, and stores one more."""
    again = stored_map([1, 2], session_id=session)
    return [
        (1.0, [stored_map([1, 2], session_id="a")]),
        (10.0, [again, stored_map([3], parent=2, session_id=session)]),
    ]


def test_e07_blocks_told_again_are_a_hit_and_no_copy(follow) -> None:
    before, after = follow(*reuse(), options=FULL), follow(*reuse(), EVICTED, options=FULL)
    assert before.figures("num_blocks", "requests", "hit_blocks", "prefix_hit_rate") == (3, 2, 2, 2 / 5)
    assert after.figures("num_blocks", "requests", "hit_blocks", "unknown_removals") == (0, 2, 2, 0)
    assert after.figures("hit_tokens", "stored_tokens") == (8, 12)
    assert [row["hash_ids"] for row in after.rows] == [[0, 1], [0, 1, 2]]


def test_e07_a_lookup_that_is_told_while_its_request_waits_is_one_request(follow) -> None:
    (first, (_, (again, more))) = reuse()
    waits = [(10.0 + 0.1 * step, [again]) for step in range(5)]
    seen = follow(first, *waits, (10.5, [again, more]), options=FULL)
    assert seen.figures("requests", "hit_blocks", "num_blocks") == (2, 2, 3)


def test_e07_lookups_of_two_sessions_are_two_requests(follow) -> None:
    first, second = reuse("b")
    _, third = reuse("c")
    seen = follow(first, second, (10.1, third[1][:1]), options=FULL)
    assert seen.figures("requests", "hit_blocks", "num_blocks") == (3, 4, 3)


def test_e07_a_block_stored_behind_another_is_a_further_copy_although_reuse_is_reported(follow) -> None:
    """Reuse is told from a first block on. The last block of a prompt found in full is computed and stored again."""
    seen = follow((1.0, [stored_map([1, 2])]), (10.0, [stored_map([1]), stored_map([2], parent=1)]), options=FULL)
    assert seen.figures("num_blocks", "hit_blocks") == (3, 1)


@pytest.mark.parametrize("kind, left", [("sliding_window", 2), ("mamba", 2), ("full_attention", 4)])
def test_e07_a_group_that_skips_blocks_gains_none_of_those_that_are_told_again(follow, kind: str, left: int) -> None:
    """vLLM tells all blocks of the hit, skipped ones too; 1 and 2 are not cached, and may be gone."""
    more = {"group_idx": 0, "kv_cache_spec_kind": kind}
    seen = follow(
        (1.0, [stored_map([3, 4], parent=2, **more)]), (10.0, [stored_map([1, 2, 3, 4], **more)]), options=FULL
    )
    assert seen["num_blocks"] == left


def test_e07_without_the_option_more_findable_blocks_than_the_pool_has_are_called_out(follow) -> None:
    seen = follow(*reuse())
    assert seen.figures("num_blocks", "warnings") == (5, [])
    again = [(10.0 + turn, [stored_map([1, 2])]) for turn in range(4)]
    seen = follow(*reuse(), *again)
    (warning,) = seen["warnings"]
    assert "13 blocks were findable at once, but a pool of 9 blocks has 8" in warning
    assert "--kv-cache-report-mode full" in warning
    assert follow(*reuse(), *again, options=FULL)["warnings"] == []
