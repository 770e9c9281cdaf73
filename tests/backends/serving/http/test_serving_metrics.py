"""What `/metrics` says is what happened, under the names that dashboards of vLLM read."""

from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="metrics need prometheus_client")

from kvledger.backends.serving.engine.request import RequestStats
from kvledger.backends.serving.http.metrics import ServingMetrics
from kvledger.backends.serving.sampling.settings import SamplingSettings
from prometheus_client.parser import text_string_to_metric_families


def scraped(running):
    """(name, labels without those that all have) -> value."""
    status, headers, body = running.get("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "honest" and sample.labels["engine"] == "0"
            labels = {name: value for name, value in sample.labels.items() if name not in ("engine", "model_name")}
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def test_requests_are_counted_by_tokens_reason_and_time(make_server, wait_for):
    running = make_server()
    ask = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    for _ in range(2):
        assert running.post("/v1/completions", ask)[0] == 200
    running.wait_until_idle()
    ended = "vllm:request_success_total", (("finished_reason", "length"),)
    wait_for(lambda: scraped(running).get(ended) == 2)  # the engine counts right after it has told the client
    found = scraped(running)
    for name, value in {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": 32,
        "vllm:generation_tokens_total": 8,
        "vllm:prefix_cache_queries_total": 32,
        "vllm:prefix_cache_hits_total": 12,
        "vllm:num_preemptions_total": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 6,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_kv_computed_tokens_sum": 20,
        "vllm:request_params_max_tokens_sum": 8,
        "vllm:iteration_tokens_total_sum": 16
        + 4
        + 6,  # two prompts less the hit, and a token for each output but the first
    }.items():
        assert found[name, ()] == value, name
    assert found["vllm:iteration_tokens_total_bucket", (("le", "+Inf"),)] == 8
    info = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
    assert info == [{"block_size": "4", "enable_prefix_caching": "True", "num_gpu_blocks": "40"}]


def test_every_token_of_every_choice_is_counted_and_a_shared_prompt_is_computed_once(make_server, wait_for):
    running = make_server()
    ask = {"prompt": "Once upon a time", "n": 3, "max_tokens": 4, "ignore_eos": True}
    assert running.post("/v1/completions", ask)[0] == 200
    wait_for(lambda: scraped(running).get(("vllm:request_success_total", (("finished_reason", "length"),))) == 3)
    found = scraped(running)
    assert found["vllm:generation_tokens_total", ()] == 12
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ()] == 16
    assert found["vllm:iteration_tokens_total_sum", ()] == 16 + 3 * 3
    assert found["vllm:num_requests_waiting", ()] == 0


def test_errors_are_counted_by_status(make_server):
    running = make_server(max_request_bytes=1_000)
    running.post("/v1/completions", {"prompt": "a" * 2_000})
    for _ in range(2):
        running.post("/v1/completions", {})
    running.get("/nowhere")  # not of the API
    found = scraped(running)
    errors = {labels: value for (name, labels), value in found.items() if name == "kvledger:http_errors_total"}
    assert errors == {(("status", "400"),): 2, (("status", "413"),): 1}


def test_a_running_request_shows_in_the_gauges(make_server, wait_for):
    import time

    running = make_server(max_num_seqs=1)
    running.engine._runner.on_step = lambda step: time.sleep(0.02)
    with running.connection() as first, running.connection() as second:
        for connection in (first, second):
            body = b'{"prompt": "abcdefgh", "max_tokens": 40, "ignore_eos": true}'
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: running.engine.stats.num_unended == 2 and running.engine.stats.num_running == 1)
        found = scraped(running)
        assert found["vllm:num_requests_running", ()] == found["vllm:num_requests_waiting", ()] == 1
        assert 0 < found["vllm:kv_cache_usage_perc", ()] < 1
    running.wait_until_idle()


def test_the_wait_that_is_advised_is_the_mean_time_between_ends(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvledger.backends.serving.http.metrics.time.monotonic", lambda: now[0])
    metrics = ServingMetrics("honest", 64)
    assert metrics.retry_after_s() == 1  # nothing is known yet

    stats = RequestStats(
        num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=None, num_preemptions=0, queue_time_s=None,
        ttft_s=None, tpot_s=None, e2e_s=None, finish_reason="stop",
    )  # fmt: skip
    settings = SamplingSettings(max_tokens=1)
    ended = SimpleNamespace(stats=stats, settings=settings, started_ns=None, first_token_ns=None, last_token_ns=None)
    for _ in range(4):
        metrics.ended(ended)
        now[0] += 7
    assert metrics.retry_after_s() == 8  # rounded up
    now[0] += 1_000
    metrics.ended(ended)
    assert metrics.retry_after_s() == 60  # never more
