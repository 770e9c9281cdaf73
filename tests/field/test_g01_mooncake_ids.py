"""Field report G01: Mooncake-style ids (one id a trace block, the same id the same tokens, milliseconds)."""

import json

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.traces import open_trace


def trace_of(tmp_path, *rows, **options):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_trace(path, **options)


def row(input_length, hash_ids, timestamp=0):
    return {"timestamp": timestamp, "input_length": input_length, "output_length": 5, "hash_ids": hash_ids}


@pytest.mark.parametrize(("input_length", "num_ids"), [(6758, 14), (512, 1), (513, 2)])
def test_g01_as_many_ids_as_blocks_of_512_are_accepted(tmp_path, input_length, num_ids):
    (request,) = trace_of(tmp_path, row(input_length, list(range(num_ids))))
    assert request.hash_ids == tuple(range(num_ids))


@pytest.mark.parametrize(("input_length", "num_ids"), [(6758, 13), (6758, 15), (512, 2), (513, 1)])
def test_g01_one_id_too_many_or_too_few_is_refused(tmp_path, input_length, num_ids):
    with pytest.raises(InputError, match=r"trace\.jsonl:1: field 'hash_ids'"):
        list(trace_of(tmp_path, row(input_length, list(range(num_ids)))))


def test_g01_a_mismatch_names_the_line_and_the_trace_block_sizes_that_fit(tmp_path):
    with pytest.raises(InputError) as refusal:
        list(trace_of(tmp_path, row(300, [7]), row(20, [0, 1])))
    assert ":2: field 'hash_ids' has 2 ids for an input_length of 20" in str(refusal.value)
    assert "fits trace block sizes 10 to 19" in str(refusal.value)


@pytest.mark.parametrize("size", range(1, 40))
def test_g01_the_sizes_suggested_are_those_that_work(tmp_path, size):
    trace = trace_of(tmp_path, row(20, [0, 1]), trace_block_size=size)
    if 10 <= size <= 19:
        assert len(list(trace)) == 1
    else:
        with pytest.raises(InputError, match="trace block sizes 10 to 19"):
            list(trace)


def test_g01_the_suggestion_is_narrowed_by_the_other_rows(tmp_path):
    rows = [row(100, list(range(7))), row(20, [0, 9]), row(33, [0, 8, 10])]
    with pytest.raises(InputError, match=r"first 3 rows fit trace block sizes 15 to 16: try --trace-block-size 16"):
        list(trace_of(tmp_path, *rows))
    assert len(list(trace_of(tmp_path, *rows, trace_block_size=16))) == 3


def test_g01_rows_that_no_one_size_explains_are_called_so(tmp_path):
    with pytest.raises(InputError, match="No one trace block size fits the first 2 rows"):
        list(trace_of(tmp_path, row(20, [0, 1]), row(20, [0, 1, 2, 3])))


def test_g01_the_trace_block_size_and_who_chose_it_are_echoed(tmp_path):
    own = trace_of(tmp_path, row(20, [0])).info
    given = trace_of(tmp_path, row(20, [0, 1]), trace_block_size=16).info
    assert (own.trace_block_size, own.trace_block_size_source) == (512, "Mooncake JSONL's own")
    assert (given.trace_block_size, given.trace_block_size_source) == (16, "given")
    assert given.as_dict()["trace_block_size"] == 16


def test_g01_one_id_stands_for_one_content_everywhere(tmp_path):
    with pytest.raises(InputError, match=r":2: field 'hash_ids\[1\]' id 1 follows id 5 here and id 0 on an earlier"):
        list(trace_of(tmp_path, row(20, [0, 1]), row(20, [5, 1]), trace_block_size=16))


def test_g01_missing_ids_make_unique_prompts_and_the_trace_says_so(tmp_path):
    bare = {"timestamp": 0, "input_length": 20, "output_length": 5}
    trace = trace_of(tmp_path, bare, bare)
    assert [request.hash_ids for request in trace] == [None, None]
    assert not trace.info.claims_reuse
    assert trace.info.notes() == [
        "no request carries hash_ids: prompts are taken as unique, so no reuse can be claimed"
    ]


def test_g01_timestamps_are_milliseconds(tmp_path):
    assert [request.arrival_s for request in trace_of(tmp_path, row(20, [0]), row(20, [0], timestamp=1500))] == [0, 1.5]
