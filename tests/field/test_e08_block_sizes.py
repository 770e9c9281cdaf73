"""E08: blocks of several sizes in one group keep their tokens, and a trace has only rows that are right
(llm-d-router#2693; vllm#44103).
"""

import json

import pytest

from tests.field.kv_streams import stored_map

GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def test_e08_a_block_that_is_full_in_part_counts_its_own_tokens(follow) -> None:
    seen = follow((1.0, [stored_map([1, 2], size=256, **GROUP), stored_map([3], parent=2, size=64, **GROUP)]))
    assert seen.figures("requests", "num_blocks", "stored_tokens", "block_sizes") == (1, 3, 576, {"0": [64, 256]})
    assert [(row["input_length"], row["hash_ids"]) for row in seen.rows] == [(576, [0, 1, 2])]
    assert seen["trace"] == {"rows": 1, "left_out": 0, "block_size": 256}


def test_e08_a_block_that_fills_up_is_replaced_and_makes_no_second_request(follow) -> None:
    """64 tokens of the third block are stored, then all 256. Another request that goes on behind 2 is its own."""
    tokens = list(range(768))
    part = stored_map([3], parent=2, size=64, token_ids=tokens[512:576])
    whole = stored_map([4], parent=2, size=256, token_ids=tokens[512:])
    other = stored_map([5], parent=2, size=256)
    seen = follow((1.0, [stored_map([1, 2], size=256), part]), (1.5, [whole]), (1.6, [other]))
    assert seen.figures("requests", "hit_blocks", "stored_tokens") == (2, 2, 768 + 256)
    assert sorted(row["input_length"] for row in seen.rows) == [768, 768]
    assert [row["hash_ids"] for row in seen.rows] == [[0, 1, 2], [0, 1, 3]]


def test_e08_an_event_whose_last_block_is_full_in_part_says_so_by_its_tokens(follow) -> None:
    """300 tokens in two blocks of 256; the second one's parent is the first."""
    seen = follow(
        (1.0, [stored_map([1, 2], size=256, token_ids=list(range(300)))]),
        (20.0, [stored_map([3], parent=2, size=256)]),
    )
    assert seen.figures("hit_blocks", "hit_tokens") == (2, 300)
    assert [row["input_length"] for row in seen.rows] == [300]
    assert seen["trace"] == {"rows": 1, "left_out": 1, "block_size": 256}


def test_e08_requests_of_another_size_are_left_out_of_the_trace_and_counted(follow, tmp_path) -> None:
    batches = [
        (1.0, [stored_map([1, 2], size=256)]),
        (20.0, [stored_map([11, 12, 13], size=64)]),
        (40.0, [stored_map([3], parent=2, size=256)]),
        (60.0, [stored_map([4], size=512)]),
    ]
    seen = follow(*batches, options=())
    assert seen.figures("num_blocks", "requests", "block_sizes") == (7, 4, {"0": [64, 256, 512]})
    assert seen["stored_tokens"] == 512 + 192 + 256 + 512
    assert [row["input_length"] for row in seen.rows] == [512, 768]
    assert seen["trace"] == {"rows": 2, "left_out": 2, "block_size": 256}


def test_e08_a_request_of_one_block_fits_any_trace_of_blocks_as_large(follow) -> None:
    small, large = (1.0, [stored_map([1], size=64)]), (20.0, [stored_map([2, 3], size=256)])
    assert follow(small, large)["trace"] == {"rows": 2, "left_out": 0, "block_size": 256}
    assert follow((1.0, [stored_map([1], size=512)]), large)["trace"] == {"rows": 1, "left_out": 1, "block_size": 512}


@pytest.mark.parametrize("event", [{"token_ids": list(range(20))}, {"block_size": 0, "token_ids": []}])
def test_e08_where_the_stream_does_not_tell_the_tokens_there_is_no_row(follow, event) -> None:
    """Blocks of the range have no hash here, or the size is not stated."""
    seen = follow((1.0, [stored_map([1, 2]) | event]), (20.0, [stored_map([5, 6])]))
    assert seen["trace"] == {"rows": 1, "left_out": 1, "block_size": 4}


def test_e08_the_lines_for_people_name_the_size_and_the_count(follow, tmp_path, monkeypatch, capsys) -> None:
    from kvledger.sim.report.logs import describe_report

    seen = follow((1.0, [stored_map([1, 2], size=256)]), (20.0, [stored_map([11, 12, 13], size=64)]))
    lines = describe_report(json.loads(seen.out[-1]), {})
    assert "trace: 1 requests in blocks of 256 tokens, 1 left out" in lines


def test_e08_the_end_of_a_prompt_inside_a_block_is_neither_a_request_nor_an_orphan(follow) -> None:
    """vLLM names the key of 64 tokens before it, 9, which no block has: 576 + 64 tokens, of which 512 are whole."""
    end = stored_map([3], parent=9, size=64, **GROUP)
    seen = follow((1.0, [stored_map([1, 2], size=256, **GROUP), end]), (30.0, [stored_map([4], parent=9, size=256)]))
    assert seen.figures("requests", "orphans", "num_blocks", "stored_tokens") == (2, 1, 4, 512 + 256)
