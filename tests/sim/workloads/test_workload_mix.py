"""Mixes: each part at its own rate, no blocks in common, and turns that still know each other."""

import json
import sys
from itertools import pairwise

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.commands.cli import main
from kvledger.sim.traces import Trace, open_trace
from kvledger.sim.workloads.builtin import open_workload
from kvledger.sim.workloads.mix import MixPart, mix_workloads, open_mix, part_at_rate, parts_by_weight


def mooncake(path, num: int, gap_ms: int, prompt: int = 1024):
    rows = [
        {"timestamp": gap_ms * i, "input_length": prompt, "output_length": 1, "hash_ids": [0, 1 + i % 3]}
        for i in range(num)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return open_trace(path)


def test_parts_come_at_their_own_rates_in_order_of_arrival(tmp_path):
    slow, fast = mooncake(tmp_path / "a", 10, 4_000), mooncake(tmp_path / "b", 100, 1_000, prompt=600)
    mix = mix_workloads([MixPart(slow, 2.0), MixPart(fast)])
    requests = list(mix)
    assert isinstance(mix, Trace)
    assert [(r.arrival_s, r.input_length) for r in requests[:4]] == [(0.0, 1024), (0.0, 600), (1.0, 600), (2.0, 1024)]
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(requests))
    assert [request.place for request in requests] == list(range(1, len(requests) + 1))
    assert requests == list(mix), "the same in every pass"


def test_a_mix_ends_with_its_first_part_and_says_so(tmp_path):
    mix = mix_workloads([MixPart(mooncake(tmp_path / "a", 5, 1_000)), MixPart(mooncake(tmp_path / "b", 100, 1_000))])
    assert sum(1 for _ in mix) == 5 + 5
    assert "the mix ends at 4 s with the first of its parts that ends, a" in mix.info.notes()


def test_parts_share_no_blocks(tmp_path):
    trace = mooncake(tmp_path / "a", 6, 1_000)
    alone = lru_curve(read_prompt_blocks(trace)).infinite.hit_blocks
    mixed = read_prompt_blocks(mix_workloads([MixPart(trace), MixPart(trace)]))
    assert mixed.num_distinct_blocks == 8
    assert lru_curve(mixed).infinite.hit_blocks == 2 * alone


def test_different_block_sizes_are_brought_to_the_greatest_common_one():
    conversation, agentic = open_workload("conversation", limit=200), open_workload("agentic", limit=100)
    code = open_workload("code", limit=100)
    mix = mix_workloads([MixPart(conversation), MixPart(agentic), MixPart(code)], limit=250)
    for request in mix:
        assert request.hash_ids is None or len(request.hash_ids) == -(-request.input_length // 64)
    assert (mix.info.trace_block_size, mix.info.trace_block_size_source) == (64, "the parts' greatest common one")
    parts = mix.info.workload["parameters"]["parts"]
    assert parts[0]["trace_block_size_source"] == "re-blocked from 512 (the workload's own)"
    assert mix.info.records_think_times


def test_turns_wait_for_turns_of_their_own_part():
    agentic = open_workload("agentic", limit=300)
    alone = list(agentic)
    mix = list(mix_workloads([MixPart(agentic, 2.0), MixPart(open_workload("code", limit=5_000))]))
    mine = [request for request in mix if request.turn is not None]
    new_place = {old.place: new.place for old, new in zip(alone, mine, strict=False)}
    for old, new in zip(alone, mine, strict=False):
        assert new.turn.waits_for == tuple(new_place[place] for place in old.turn.waits_for)
        if old.turn.think_s is not None:
            assert new.turn.think_s == pytest.approx(old.turn.think_s / 2)


def test_rates_can_be_given_in_requests_a_second_or_by_weight():
    chat, sharegpt = open_workload("conversation", limit=3_000), open_workload("sharegpt", limit=3_000)
    assert list(part_at_rate(sharegpt, 5.0).trace) == list(sharegpt)
    requests = list(mix_workloads(parts_by_weight([chat, sharegpt], [3.0, 1.0], 8.0), limit=2_000))
    assert len(requests) / requests[-1].arrival_s == pytest.approx(8.0, rel=0.1)
    assert sum(request.hash_ids is not None for request in requests) == pytest.approx(1_500, rel=0.1)


def test_a_window_is_cut_out_of_the_mix(tmp_path):
    parts = [MixPart(mooncake(tmp_path / name, 20, 1_000)) for name in "ab"]
    requests = list(mix_workloads(parts, skip_first=5, limit=4, rate_scale=2.0))
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 0.5, 1.0]


def test_a_description_names_parts_and_rates(tmp_path):
    path = tmp_path / "mine.jsonl"
    mooncake(path, 400, 100)
    mix = open_mix(f"conversation*0.5+sharegpt@3+{path}", seed=7, limit=300)
    assert sum(1 for _ in mix) == 300
    parts = mix.info.workload["parameters"]["parts"]
    assert [part["name"] for part in parts] == ["conversation", "sharegpt", "mine.jsonl"]
    assert parts[0]["rate_scale"] == 0.5
    assert parts[1]["rate_scale"] == pytest.approx(1.5, rel=0.1)
    assert parts[0]["workload"]["seed"] == 7


def test_two_parts_of_one_name_are_different_requests():
    lengths = [request.input_length for request in open_mix("code+code", limit=400)]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("code*2", "a mix of 1 part is no mix"),
        ("code+", "'' is no part of a mix"),
        ("code*x+code", "'code\\*x'"),
        ("code*0+code", "rate scale 0.0; it must be a number above 0"),
        ("code@0+code", "0.0 requests a second; it must be a number above 0"),
        ("code+chat", "unknown workload 'chat'; known: conversation"),
        ("code*1e+code", "'1e' is not a number"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(description, message):
    with pytest.raises(InputError, match=message):
        open_mix(description)


def test_a_trace_without_a_rate_cannot_be_given_one(tmp_path):
    with pytest.raises(InputError, match="all its requests come at once"):
        part_at_rate(mooncake(tmp_path / "a", 5, 0), 2.0)
    with pytest.raises(InputError, match="each needs one above 0"):
        parts_by_weight([mooncake(tmp_path / "a", 5, 10)], [0.0], 2.0)


def test_the_command_line_takes_a_mix(monkeypatch, capsys):
    arguments = ["curve", "--workload", "conversation+agentic*2", "--limit", "200", "--policy", "lru", "--json"]
    monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    assert answer["trace"]["name"] == "conversation + agentic"
    assert answer["block_size"] == 64
