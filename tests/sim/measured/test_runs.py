"""Runs of real servers: every format of a benchmark client gives the same requests."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.measured.runs import BLOCK_SIZE, MeasuredRun, read_run

# Two requests: sent at 100 and 100.5 s; 40 and 20 tokens in, 3 and 1 out; first tokens after 0.2 and 0.3 s.
VLLM_BENCH = {
    "date": "20261201",
    "start_times": [100.0, 100.5, 101.0],
    "input_lens": [40, 20, 30],
    "output_lens": [3, 1, 0],
    "ttfts": [0.2, 0.3, 0.0],
    "itls": [[0.05, 0.05], [], []],
}
GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {
                        "request_id": "a",
                        "request_start_time": 100.0,
                        "prompt_tokens": 40,
                        "output_tokens": 3,
                        "time_to_first_token_ms": 200.0,
                        "request_latency": 0.3,
                    },
                    {
                        "request_id": "b",
                        "request_start_time": 100.5,
                        "prompt_tokens": 20,
                        "output_tokens": 1,
                        "time_to_first_token_ms": 300.0,
                        "request_latency": 0.3,
                    },
                ],
                "errored": [{"request_id": "c"}],
                "incomplete": [],
            }
        }
    ]
}


def aiperf(name: str, start_ns: int, tokens: tuple[int, int], ttft_ms: float, latency_ms: float) -> dict[str, Any]:
    return {
        "metadata": {"x_request_id": name, "request_start_ns": start_ns},
        "metrics": {
            "input_sequence_length": {"value": tokens[0], "unit": "tokens"},
            "output_sequence_length": {"value": tokens[1], "unit": "tokens"},
            "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "request_latency": {"value": latency_ms, "unit": "ms"},
        },
        "error": None,
    }


AIPERF = [
    aiperf("a", 100_000_000_000, (40, 3), 200.0, 300.0),
    aiperf("b", 100_500_000_000, (20, 1), 300.0, 300.0),
    {"metadata": {"x_request_id": "c"}, "metrics": {"error_isl": {"value": 3}}, "error": {"code": 499}},
]
LLMSERVINGSIM = [
    {
        "request_id": "a",
        "input_toks": 40,
        "output_toks": 3,
        "queued_ts": 7.0,
        "scheduled_ts": 7.1,
        "first_token_ts": 7.2,
        "last_token_ts": 7.3,
    },
    {
        "request_id": "b",
        "input_toks": 20,
        "output_toks": 1,
        "queued_ts": 7.5,
        "scheduled_ts": 7.5,
        "first_token_ts": 7.8,
        "last_token_ts": 7.8,
    },
]


def write(path: Path, *documents: Any) -> Path:
    text = "".join(json.dumps(document) + "\n" for document in documents)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(params=["vLLM bench", "GuideLLM", "AIPerf", "LLMServingSim"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> MeasuredRun:
    documents = {"vLLM bench": [VLLM_BENCH], "GuideLLM": [GUIDELLM], "AIPerf": AIPERF, "LLMServingSim": LLMSERVINGSIM}
    found = read_run(write(tmp_path / "run.json", *documents[request.param]))
    assert found.format == request.param
    return found


def test_every_format_gives_the_same_requests(run: MeasuredRun) -> None:
    first, second = run.requests
    assert (first.sent_s, first.input_len, first.output_len) == (0.0, 40, 3)
    assert (second.sent_s, second.input_len, second.output_len) == (pytest.approx(0.5), 20, 1)
    assert (first.ttft_s, first.e2e_s, first.tpot_s) == (pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.05))
    assert (second.ttft_s, second.tpot_s) == (pytest.approx(0.3), None)


def test_requests_without_an_answer_are_counted(run: MeasuredRun) -> None:
    assert run.num_failed == (0 if run.format == "LLMServingSim" else 1)


def test_times_of_an_engine_are_without_its_http_server(run: MeasuredRun) -> None:
    assert run.in_engine == (run.format == "LLMServingSim")
    assert (run.requests[0].queue_s is not None) == run.in_engine


def test_blocks_are_shared_up_to_the_first_token_that_differs(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", *LLMSERVINGSIM)
    tokens = write(
        tmp_path / "tokens.jsonl.gz",
        {"input_tok_ids": list(range(40))},
        {"input_tok_ids": [*range(BLOCK_SIZE), 9, 9, 9, 9]},
    )
    first, second = (request.hash_ids for request in read_run(path, tokens).requests)
    assert first is not None and second is not None
    assert (len(first), len(second)) == (3, 2)
    assert first[0] == second[0] and first[1] != second[1]


def test_tokens_of_other_requests_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", *LLMSERVINGSIM)
    few = write(tmp_path / "few.jsonl", {"input_tok_ids": list(range(40))})
    with pytest.raises(InputError, match="1 prompts for 2 requests"):
        read_run(path, few)
    short = write(tmp_path / "short.jsonl", {"input_tok_ids": [1] * 39}, {"input_tok_ids": [1] * 20})
    with pytest.raises(InputError, match="39 tokens; request a has 40"):
        read_run(path, short)


def test_files_beside_a_run_state_the_server(tmp_path: Path) -> None:
    path = write(tmp_path / "x.req.jsonl", *LLMSERVINGSIM)
    cache = {"num_gpu_blocks": 77, "block_size": 16, "enable_prefix_caching": True}
    write(tmp_path / "x.meta.json", {"engine_kwargs": {"max_num_seqs": 5, "max_model_len": None}, "kv_cache": cache})
    (tmp_path / "x.ts.csv").write_text("t,running,waiting,kv_cache_pct\n1.0,2,0,50.0\n")
    run = read_run(path)
    assert run.facts == {
        "max_num_seqs": 5,
        "num_gpu_blocks_override": 77,
        "block_size": 16,
        "enable_prefix_caching": True,
    }
    assert run.series is not None
    assert run.series.columns == {"time_s": [1.0], "running": [2.0], "waiting": [0.0], "kv_cache_usage": [0.5]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json", "not JSON"),
        ('{"a": 1}', "no run that is known here: .* --save-detailed"),
        ('{"ttfts": [0.1], "start_times": [1.0]}', "read as vLLM bench, but KeyError: 'input_lens'"),
        (
            '{"ttfts": [0.0], "start_times": [1.0], "input_lens": [1], "output_lens": [0], "itls": [[]]}',
            "none of the 1",
        ),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match=reason) as raised:
        read_run(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_run(tmp_path / "none.json")


def test_a_log_of_a_live_engine_gives_the_times_at_which_its_steps_ended(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="event logs need pyarrow")
    from kvledger.backends.serving.engine.recording import live_header
    from kvledger.backends.sinks import Clock, DurableLog, FlushPolicy, RequestArrived, RequestEnded, StepComputed
    from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request, SchedulerConfig, StepLoad

    milliseconds = 0
    clock = Clock("unix", lambda: 5_000_000_000 + milliseconds * 1_000_000)  # the engine's own clock began 5 s before
    config = AllocatorConfig(num_blocks=20, groups=[FullAttention(4)], max_model_len=40)
    header = live_header(config, SchedulerConfig(max_num_seqs=4), {})
    with DurableLog.create(tmp_path / "live", flush=FlushPolicy(every_commits=1), clock=clock, header=header) as log:
        allocator = KVCacheAllocator(config, sinks=[log])
        first, second = Request("first", 6), Request("second", 9)
        for request in (first, second):
            milliseconds += 10
            seconds, facts = milliseconds / 1000, {"max_tokens": 2, "priority": 0}
            log.note(RequestArrived(request.request_id, seconds, request.num_prompt_tokens, facts=facts))
        #                 the end of the step, and the tokens of each request in it: the second prompt takes two steps
        for end, tokens in [(100, {first: 6, second: 5}), (150, {first: 1, second: 4}), (180, {second: 1})]:
            for request, count in tokens.items():
                assert allocator.allocate(request, count)
            milliseconds = end
            log.note(StepComputed(1, StepLoad(sum(tokens.values()), 0, 1, 0, 1)))
            for request in tokens:
                if (request, end) in ((first, 150), (second, 180)):
                    log.note(RequestEnded(request.request_id, "length", 2))
    run = read_run(tmp_path / "live")
    assert run.format == "kvledger" and run.in_engine and run.num_failed == 0
    assert run.facts == {
        "num_gpu_blocks_override": 20,
        "block_size": 4,
        "enable_prefix_caching": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8192,
        "async_scheduling": False,
    }
    assert [each.name for each in run.requests] == ["first", "second"]
    assert [(each.input_len, each.output_len) for each in run.requests] == [(6, 2), (9, 2)]
    assert [each.sent_s for each in run.requests] == pytest.approx([0.0, 0.01])
    assert [each.ttft_s for each in run.requests] == pytest.approx([0.09, 0.13])
    assert [each.e2e_s for each in run.requests] == pytest.approx([0.14, 0.16])
    with pytest.raises(InputError, match=r"has no effect on .*live: a log holds the blocks"):
        read_run(tmp_path / "live", Path("prompts.jsonl"))


def test_a_log_of_another_command_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="event logs need pyarrow")
    from kvledger.backends.sinks import DurableLog, FlushPolicy

    with DurableLog.create(tmp_path / "bare", flush=FlushPolicy(every_commits=1), header={"command": "replay"}):
        pass
    with pytest.raises(InputError, match="the log of replay, not of kvledger serve"):
        read_run(tmp_path / "bare")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.meta.json", "no", "x.meta.json: read as the server's settings beside the run, but JSONDecodeError"),
        ("x.meta.json", '{"kv_cache": {"num_gpu_blocks": 5}}', "KeyError: 'block_size'; mend it or take it away"),
        ("x.ts.csv", "t,running\n1.0,many\n", "x.ts.csv: read as the server's load beside the run, but ValueError"),
    ],
)
def test_a_file_beside_a_run_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = write(tmp_path / "x.req.jsonl", *LLMSERVINGSIM)
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=reason):
        read_run(path)


@pytest.mark.parametrize(("text", "reason"), [("no", "not a JSON record a line"), ("[1]\n[2]\n", "no input_tok_ids")])
def test_a_file_of_tokens_that_holds_none_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path / "run.jsonl", *LLMSERVINGSIM)
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(InputError, match=reason):
        read_run(path, tmp_path / "tokens")
