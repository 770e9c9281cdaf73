"""E05: what other media hold is told apart from the GPU's, and a copy to one of them is no request (aibrix#2285;
sglang#39109).
"""

import pytest

from tests.field.kv_streams import removed_map, stored_map


def offloaded(medium: str | None, gpu: str | None = "GPU"):
    """Two blocks are stored, copied to another medium and dropped from the GPU; then another prompt comes."""
    return [
        (1.0, [stored_map([1, 2], medium=gpu)]),
        (2.0, [stored_map([1, 2], medium=medium, token_ids=[])]),
        (3.0, [removed_map([1, 2], medium=gpu)]),
        (4.0, [stored_map([5, 6], medium=gpu)]),
    ]


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "cpu", "DISK"])
@pytest.mark.parametrize("gpu", ["GPU", None, "gpu"])
def test_e05_a_copy_to_another_medium_is_no_request(follow, medium: str, gpu: str | None) -> None:
    seen = follow(*offloaded(medium, gpu))
    assert seen.figures("requests", "hit_blocks", "orphans", "unknown_removals") == (2, 0, 0, 0)
    assert seen.figures("num_blocks", "num_keys", "occupancy") == (2, 2, 0.25)
    assert seen["blocks_by_medium"] == {"GPU": 2, medium.upper(): 2}
    assert seen.figures("stored", "removed") == (4, 2)
    assert seen["twice_memory"]["blocks_not_computed_again"] == 0
    assert [row["hash_ids"] for row in seen.rows] == [[0, 1], [2, 3]]


def test_e05_blocks_of_another_medium_are_no_hit_on_the_gpu(follow) -> None:
    """A block whose parent only host memory holds is an orphan on the GPU."""
    seen = follow(*offloaded("CPU")[:3], (4.0, [stored_map([3], parent=2)]))
    assert seen.figures("requests", "hit_blocks", "orphans") == (2, 0, 1)


def test_e05_what_leaves_another_medium_is_not_evicted_from_the_gpu(follow) -> None:
    """The GPU never lost 5 and 6, so a second copy of them is nothing that more memory would have kept."""
    seen = follow(
        (1.0, [stored_map([5, 6]), stored_map([5, 6], medium="CPU", token_ids=[])]),
        (2.0, [removed_map([5, 6], medium="CPU")]),
        (9.0, [stored_map([5, 6])]),
    )
    assert seen["twice_memory"]["blocks_not_computed_again"] == 0
    assert seen["blocks_by_medium"] == {"GPU": 4}


def test_e05_the_gpus_event_describes_a_block_that_another_medium_had_first(follow) -> None:
    """An event of host memory has neither parent nor tokens (vLLM's placeholder); the hit and its tokens need both."""
    seen = follow(
        (1.0, [stored_map([1, 2], medium="CPU", token_ids=[], block_size=0)]),
        (2.0, [stored_map([1]), stored_map([2], parent=1)]),
        (20.0, [stored_map([3], parent=2)]),
    )
    assert seen.figures("requests", "hit_blocks", "hit_tokens") == (2, 2, 8)
    assert [row["input_length"] for row in seen.rows] == [8, 12]


def test_e05_a_stream_without_the_gpu_says_so(follow) -> None:
    seen = follow((1.0, [stored_map([1, 2], medium="CPU")]))
    assert seen.figures("num_blocks", "requests", "blocks_by_medium") == (0, 0, {"CPU": 2})
    assert "only other media than the GPU stored blocks (CPU)" in seen["warnings"][0]
