"""Workloads fitted to a trace: the same shape in lengths, arrivals and reuse, seeded, under ids of their own."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.random_draws import Draws
from kvledger.sim.traces import Trace, open_trace
from kvledger.sim.workloads.builtin import open_workload
from kvledger.sim.workloads.fitted import KINDS, closeness_sentence, fit_arrivals, fit_workload, open_fitted

TRACES = os.environ.get("KVLEDGER_TRACES")


@pytest.fixture(scope="module")
def conversation():
    return fit_workload(open_workload("conversation", seed=5, limit=4_000))


def test_one_seed_gives_the_same_requests_and_another_gives_others(conversation):
    requests = list(conversation.open(seed=1, limit=300))
    assert requests == list(conversation.open(seed=1, limit=300))
    assert requests != list(conversation.open(seed=2, limit=300))


def test_a_fitted_workload_is_a_trace_of_the_length_of_what_it_was_fitted_to(conversation):
    workload = conversation.open(seed=0)
    assert isinstance(workload, Trace)
    arrivals = [request.arrival_s for request in workload]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(4_000, rel=0.1)
    assert workload.info.window.duration_s <= conversation.parameters.duration_s
    assert (workload.info.format, workload.info.trace_block_size) == ("fitted workload", 512)


def test_prompts_have_an_id_for_every_block_with_one_parent_each(conversation):
    parents: dict[int, int] = {}
    for request in conversation.open(seed=3, limit=1_500):
        assert len(request.hash_ids) == -(-request.input_length // 512)
        for parent, hash_id in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert parents.setdefault(hash_id, parent) == parent


def test_lengths_arrivals_and_reuse_are_close_and_this_is_measured(conversation):
    figures = conversation.closeness(seed=0)
    assert figures["input_length"]["ks"] < 0.05
    assert figures["output_length"]["ks"] < 0.03
    assert figures["gap_s"]["ks"] < 0.02
    assert figures["requests_per_s"]["workload"] == pytest.approx(figures["requests_per_s"]["trace"], rel=0.05)
    assert figures["gap_variation"]["workload"] == pytest.approx(figures["gap_variation"]["trace"], rel=0.1)
    assert figures["largest_hit_rate_difference"] < 0.05
    assert "LRU hit rates within" in closeness_sentence(figures)
    json.dumps(figures, allow_nan=False)


def test_a_workload_of_nothing_shared_claims_no_reuse():
    fitted = fit_workload(open_workload("code", limit=3_000))
    workload = fitted.open(seed=0, limit=1_000)
    assert {request.hash_ids for request in workload} == {None}
    figures = fitted.closeness()
    assert "hit_rate" not in figures
    assert figures["gap_variation"]["workload"] == pytest.approx(figures["gap_variation"]["trace"], rel=0.3), "bursts"
    assert figures["input_length"]["ks"] < 0.05


def test_sessions_keep_their_turns_and_think_times():
    fitted = fit_workload(open_workload("agentic", limit=1_500))
    assert fitted.parameters.links_turns
    workload = fitted.open(seed=0, limit=1_500)
    turns = [request.turn for request in workload]
    assert workload.info.records_think_times
    followers = [turn for turn in turns if turn.waits_for]
    assert len(followers) > 1_000
    thinks = [turn.think_s for turn in followers if turn.think_s is not None]
    own = [r.turn.think_s for r in open_workload("agentic", limit=1_500) if r.turn.think_s is not None]
    assert np.median(thinks) == pytest.approx(np.median(own), rel=0.2)


def test_full_blocks_only_stays_so(tmp_path):
    requests = [
        {"t": 5.0 * i, "in": 100 + 70 * i, "out": 9, "hash_ids": list(range((100 + 70 * i) // 64))} for i in range(9)
    ]
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": requests}))
    workload = fit_workload(open_trace(path)).open(limit=40)
    assert all(len(request.hash_ids) == request.input_length // 64 for request in workload)
    assert workload.info.full_blocks_only
    read_prompt_blocks(workload)


def test_a_trace_of_one_request_is_fitted_too(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}))
    fitted = fit_workload(open_trace(path))
    (request,) = fitted.open(limit=1)
    assert (request.input_length, request.output_length) == (600, 2)
    json.dumps(fitted.closeness(), allow_nan=False)


def test_what_was_fitted_is_stated_without_its_tables(conversation):
    stated = conversation.open().info.workload["parameters"]
    assert stated["num_requests"] == 4_000
    assert sum(stated[f"share_{kind}"] for kind in KINDS) == pytest.approx(1.0)
    assert len(json.dumps(stated)) < 2_000


def test_arrivals_keep_batches_gaps_and_that_bursts_follow_bursts():
    draws = Draws(3)
    times, now = [], 0.0
    for burst in range(300):
        for _ in range(10):
            times.extend([now] * (1 + burst % 2))
            now += draws.exponential(0.01)
        now += draws.exponential(5.0)
    model = fit_arrivals(np.array(times))
    drawn = []
    for at in model.times(Draws(0)):
        drawn.append(at)
        if len(drawn) == len(times):
            break
    assert drawn[-1] == pytest.approx(times[-1], rel=0.15)
    gaps, own = np.diff(np.unique(drawn)), np.diff(np.unique(times))
    assert gaps.std() / gaps.mean() == pytest.approx(own.std() / own.mean(), rel=0.2)
    short_after_short = ((gaps[1:] < 0.1) & (gaps[:-1] < 0.1)).mean()
    assert short_after_short == pytest.approx(((own[1:] < 0.1) & (own[:-1] < 0.1)).mean(), abs=0.05)
    with pytest.raises(InputError, match="no arrivals to fit"):
        fit_arrivals(np.array([]))


def test_the_command_line_fits_and_says_how_close(kvledger, tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 50 * i, "input_length": 40, "output_length": 3, "hash_ids": [0, 10 + i % 7, 100 + i]}
        for i in range(200)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--fit", str(path), "--trace-block-size", "16", "--seed", "4", "--limit", "150"]
    code, out, err = kvledger("curve", *options, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["window"]["num_requests"] == 150
    assert answer["trace"]["workload"]["seed"] == 4
    assert answer["trace"]["workload"]["parameters"]["closeness"]["requests"] == {"trace": 200, "workload": 200}
    _, out, _ = kvledger("replay", *options, "--block-size", "16", "--num-gpu-blocks-override", "100")
    assert "Note: fitted workload beside its trace: mean prompt" in out
    code, _, err = kvledger("curve", "--fit", str(path), "--workload", "code")
    assert code == 2
    assert "not more than one of them" in err


@pytest.mark.skipif(not TRACES, reason="KVLEDGER_TRACES is not set: no public traces to fit to")
def test_a_fit_to_the_public_conversation_trace_is_within_three_points_of_its_curve():
    workload = open_fitted(open_trace(Path(str(TRACES)) / "mooncake/conversation_trace.jsonl.gz"))
    figures = workload.info.workload["parameters"]["closeness"]
    assert figures["largest_hit_rate_difference"] < 0.03
    assert figures["input_length"]["ks"] < 0.03
    assert figures["output_length"]["ks"] < 0.02
