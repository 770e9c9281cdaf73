"""`kvledger follow`: a live publisher on loopback, a recorded stream, and what is printed of them."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvledger.backends.sinks.errors import LogDamagedError
from kvledger.backends.sinks.kv_events.file import KVEventFileWriter, read_kv_event_file
from kvledger.backends.sinks.kv_events.publisher import KVEventPublisher
from kvledger.backends.sinks.kv_events.schema import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventsConfig,
    encode_batch,
)
from kvledger.backends.sinks.metrics.endpoint import PrometheusEndpoint
from kvledger.backends.sinks.metrics.ledger_metrics import LedgerMetrics
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request
from kvledger.core.errors import InputError

pytestmark = pytest.mark.timeout(60)
LOCAL = "tcp://127.0.0.1:*"


def stored(parent: int | None, *hashes: int) -> BlockStored:
    return BlockStored(list(hashes), parent, [0] * 16 * len(hashes), 16, medium="GPU", group_idx=0)


def batches() -> list[KVEventBatch]:
    """Ten requests that share their first two blocks, ten seconds apart."""
    out = [KVEventBatch(0.0, [stored(None, 1, 2, 100)])]
    out += [KVEventBatch(10.0 * i, [stored(2, 100 + i)]) for i in range(1, 10)]
    return [*out, KVEventBatch(100.0, [BlockRemoved([100], "GPU", 0)])]


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    path = tmp_path / "server.kvevents"
    writer = KVEventFileWriter(path)
    for sequence, batch in enumerate(batches()):
        writer.write(sequence, encode_batch(batch))
    writer.close()
    return str(path)


@pytest.fixture
def publishing() -> Iterator[KVEventPublisher]:
    """A publisher whose thread of life sends a batch every 10 ms for as long as the test runs."""
    publisher = KVEventPublisher(KVEventsConfig(endpoint=LOCAL, replay_endpoint=LOCAL))
    over = threading.Event()

    def publish() -> None:
        number = 0
        while not over.wait(0.01):
            publisher.publish([stored(2 if number else None, *([] if number else [1, 2]), 100 + number)])
            number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    yield publisher
    over.set()
    thread.join()
    publisher.close()


def test_a_recorded_stream_is_followed_on_its_own_clock(kvledger, recorded) -> None:
    code, out, err = kvledger("follow", recorded, "--interval", "20", "--num-gpu-blocks", "101", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    last = lines[-1]
    assert (code, err) == (0, "")
    assert len(lines) == 6
    assert (last["requests"], last["hit_blocks"], last["num_blocks"]) == (10, 18, 11)
    assert last["prefix_hit_rate"] == 18 / (18 + 12)
    assert last["occupancy"] == 11 / 100
    assert last["stream"]["applied"] == 11
    assert "requests that store nothing are invisible" in last["assumptions"]["prefix_hit_rate"]


def test_the_lines_for_people_end_with_the_sum_and_what_it_rests_on(kvledger, recorded) -> None:
    code, out, _ = kvledger("follow", recorded, "--interval", "50")
    assert code == 0
    assert out.splitlines()[0].split() == [
        *("time", "blocks", "filled", "stored/s", "removed/s", "requests", "hits", "at", "2x", "gaps")
    ]
    assert "10 requests seen; the cache served 60.0 % of their blocks" in out
    assert "requests that store nothing are invisible" in out


def test_a_stream_becomes_a_trace_whose_curve_has_its_hits(kvledger, recorded, tmp_path) -> None:
    trace = tmp_path / "seen.jsonl"
    code, _, _ = kvledger("follow", recorded, "--trace-out", str(trace))
    assert code == 0
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [10_000.0 * i for i in range(10)]
    assert all(row["hash_ids"][:2] == rows[0]["hash_ids"][:2] for row in rows)
    code, out, _ = kvledger("curve", str(trace), "--trace-block-size", "16", "--capacities", "100", "--json")
    assert code == 0
    assert json.loads(out)["points"][0]["hit_blocks"] == 18


def test_a_running_server_is_followed_recorded_and_measured(kvledger, publishing, tmp_path) -> None:
    record = tmp_path / "live.kvevents"
    arguments = ["--replay-endpoint", publishing.replay_endpoint, "--record", str(record)]
    arguments += ["--interval", "0.3", "--duration", "1.5", "--json"]
    code, out, _ = kvledger("follow", publishing.endpoint, *arguments)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert 2 <= len(lines) <= 6
    assert lines[-1]["requests"] > 10
    assert lines[-1]["orphans"] == 0, "what was before is asked for"
    assert lines[-1]["stream"]["unrecoverable"] == 0
    again = json.loads(kvledger("follow", str(record), "--json")[1].splitlines()[-1])
    for name in ("requests", "hit_blocks", "num_blocks", "prefix_hit_rate"):
        assert again[name] == lines[-1][name], name


def test_a_shadow_ledger_is_scraped_while_it_follows(kvledger, publishing) -> None:
    scraped: list[str] = []

    def scrape() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (scraped and "prefix_cache_hits_total 0" not in scraped[-1]):
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    scraped.append(answer.read().decode())
            except OSError:
                continue

    port = _free_port()
    thread = threading.Thread(target=scrape)
    thread.start()
    arguments = ["--replay-endpoint", publishing.replay_endpoint, "--duration", "3", "--prometheus-port", str(port)]
    kvledger("follow", publishing.endpoint, *arguments)
    thread.join()
    assert "vllm:prefix_cache_queries_total" in scraped[-1]
    assert "vllm:prefix_cache_hits_total" in scraped[-1]
    assert "kvledger:shadow_blocks " in scraped[-1]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_live_allocator_is_scraped_under_the_names_of_vllm() -> None:
    metrics = LedgerMetrics()
    config = AllocatorConfig(num_blocks=11, groups=[FullAttention(16)], max_model_len=160, max_num_reqs=4)
    allocator = KVCacheAllocator(config, [metrics])
    metrics.state = allocator.state

    class Keys:
        def keys(self, start: int, stop: int) -> list[int]:
            return list(range(start, stop))

    def admit(name: str) -> None:
        request = Request(name, 65, keys=Keys())
        match = allocator.match_prefix(request)
        allocator.allocate(request, 65 - match.num_hit_tokens, match)

    admit("a")
    admit("b")
    allocator.preempt("b")
    admit("b")
    allocator.free("a")
    with (
        PrometheusEndpoint(metrics, port=0, labels={"model_name": "m"}) as endpoint,
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer,
    ):
        text = answer.read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['vllm:kv_cache_usage_perc{model_name="m"}']) == 0.5
    assert float(values['vllm:num_requests_running{model_name="m"}']) == 1
    assert float(values['vllm:num_preemptions_total{model_name="m"}']) == 1
    assert float(values['vllm:prefix_cache_hits_total{model_name="m"}']) == 128
    assert float(values['vllm:request_success_total{finished_reason="stop",model_name="m"}']) == 1
    assert 'vllm:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="11"}' in values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "neither a recorded stream of KV events nor an endpoint"),
        (["tcp://127.0.0.1:1", "--interval", "0"], "--interval is 0.0"),
        (["tcp://127.0.0.1:1", "--continuation-s", "-1"], "--continuation-s is -1.0"),
        (["tcp://127.0.0.1:1", "--kv-cache-report-mode", "all"], "'all'; it must be incremental or full"),
    ],
)
def test_what_cannot_be_followed_is_refused(kvledger, arguments, message) -> None:
    code, out, err = kvledger("follow", *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("option", ["--record", "--trace-out"])
def test_a_file_that_is_there_is_not_overwritten(kvledger, recorded, tmp_path, option) -> None:
    (tmp_path / "mine").write_text("keep")
    code, _, err = kvledger("follow", recorded, option, str(tmp_path / "mine"))
    assert code == 2
    assert "exists already" in err
    assert (tmp_path / "mine").read_text() == "keep"


def test_where_nobody_publishes_nothing_is_seen(kvledger) -> None:
    code, out, _ = kvledger("follow", f"tcp://127.0.0.1:{_free_port()}", "--duration", "0.3", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["num_blocks"] == 0


# -- recorded streams --------------------------------------------------------------------------------------------------


def test_a_recording_gives_back_every_message(recorded) -> None:
    assert list(read_kv_event_file(recorded)) == [(i, encode_batch(batch)) for i, batch in enumerate(batches())]


def test_a_recording_that_ends_inside_a_message_ends_before_it(recorded) -> None:
    path = Path(recorded)
    whole = path.read_bytes()
    for cut in (1, 5, 30):
        path.write_bytes(whole[:-cut])
        assert len(list(read_kv_event_file(path))) == 10


def test_a_flipped_bit_in_a_recording_is_named(recorded) -> None:
    path = Path(recorded)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamagedError, match="message 10 does not match its checksum"):
        list(read_kv_event_file(path))
    with pytest.raises(InputError, match="no recorded stream"):
        list(read_kv_event_file(__file__))
