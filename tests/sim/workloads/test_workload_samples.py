"""Parallel samples in the engine: requests of one prompt that find its full blocks, by a client that reads all."""

import json
import sys

import pytest
from kvledger.core import AllocatorConfig, FullAttention, InputError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.commands.cli import main
from kvledger.sim.engine.replay import replay
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import Trace, open_trace
from kvledger.sim.traces.derived import SampledTrace
from kvledger.sim.workloads.builtin import open_workload


def run(trace, **options):
    return replay(
        trace,
        allocator=AllocatorConfig(num_blocks=500, groups=[FullAttention(16)], max_model_len=4096, max_num_reqs=32),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048),
        latency=LinearLatency(0.01, 0.0, 0.0),
        trace_block_size=trace.info.trace_block_size,
        **options,
    ).to_json()


def log(path, *rows: dict):
    path.write_text("\n".join(json.dumps({"input_tokens": 100, "output_tokens": 5, **row}) for row in rows))
    return open_trace(path)


def test_samples_find_the_full_blocks_of_their_prompt(tmp_path):
    trace = SampledTrace(log(tmp_path / "log.jsonl", {"arrival_s": 0.0}, {"arrival_s": 60.0}), 4)
    assert isinstance(trace, Trace)
    report = run(trace)
    assert report["requests"]["finished"] == 8
    assert report["prefix_cache"]["hits_tokens"] == 2 * 3 * 96
    assert report["throughput"]["output_tokens_per_s"] * report["simulated_seconds"] == pytest.approx(8 * 5)


def test_samples_of_traced_prompts_keep_their_ids_and_come_together():
    workload = open_workload("conversation", limit=20)
    sampled = list(SampledTrace(workload, 3))
    originals = list(workload)
    assert len(sampled) == 60
    assert [request.place for request in sampled] == sorted({request.place for request in sampled})
    for index, request in enumerate(sampled):
        original = originals[index // 3]
        assert (request.arrival_s, request.hash_ids) == (original.arrival_s, original.hash_ids)


def test_a_next_turn_waits_for_all_samples_of_the_one_before(tmp_path):
    trace = log(
        tmp_path / "log.jsonl",
        {"arrival_s": 0.0, "session": "a", "duration_s": 1.0},
        {"arrival_s": 3.0, "session": "a", "duration_s": 1.0},
    )
    sampled = list(SampledTrace(trace, 2))
    assert [request.turn.waits_for for request in sampled] == [(), (), (1, 2), (1, 2)]
    report = run(SampledTrace(trace, 2))
    assert report["requests"]["finished"] == 4
    # five steps, two seconds of thinking, five steps
    assert report["simulated_seconds"] == pytest.approx(2.1)


def test_what_was_made_of_the_trace_is_told(tmp_path):
    trace = SampledTrace(log(tmp_path / "log.jsonl", {"arrival_s": 0.0}), 2)
    list(trace)
    assert any("every request has 2 samples" in note for note in trace.info.notes())
    assert (trace.info.trace_block_size, trace.info.trace_block_size_source) == (16, "chosen for samples")


def test_a_number_of_samples_out_of_range_is_refused():
    with pytest.raises(InputError, match="--n is 0; a request has from 1 to 1,024 samples"):
        SampledTrace(open_workload("code"), 0)


def test_the_command_line_replays_samples(monkeypatch, capsys):
    arguments = ["replay", "--workload", "sharegpt", "--limit", "10", "--n", "3", "--num-gpu-blocks-override", "2000"]
    monkeypatch.setattr(sys, "argv", ["kvledger", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    assert answer["requests"]["finished"] == 30
    assert answer["prefix_cache"]["hit_rate"] > 0.5
