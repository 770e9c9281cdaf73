"""The files of a fleet: those of a replay, with the engine that each row, series and track is of."""

import csv
import json
import math
import re
from collections import Counter
from pathlib import Path

import attrs
import pytest
from kvledger.core import AllocatorConfig, FullAttention
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.exports.run_exports import ExportOptions, RunExports
from kvledger.sim.fleet.disaggregation import DisaggregatedShape, replay_disaggregated
from kvledger.sim.fleet.fleet import EngineParts, FleetShape, replay_fleet
from kvledger.sim.fleet.links import TransferModel
from kvledger.sim.fleet.routing import make_router
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.workloads.builtin import open_workload
from prometheus_client.parser import text_string_to_metric_families as read_text

POOL = AllocatorConfig(num_blocks=2000, groups=[FullAttention(512)], max_model_len=1 << 20, max_num_reqs=64)
POOLS = DisaggregatedShape(num_prefill_replicas=1, num_decode_replicas=2)
ALIKE = FleetShape(num_replicas=2, data_parallel_size=2)
NAMES = {"prefill": ["prefill 0", "decode 0", "decode 1"], "alike": ["0", "0.1", "1", "1.1"]}


def run(folder: Path, shape, **files: str):
    options = {name: str(folder / file) for name, file in files.items()}
    if "openmetrics_out" in files:
        options["openmetrics_start"] = 1_700_000_000
    with RunExports(ExportOptions(**options), POOL, {}, engines=shape.engine_names) as exports:
        parts = EngineParts(
            allocator=POOL,
            scheduler=SchedulerConfig(max_num_seqs=64),
            latency=LinearLatency(),
            listeners_of=exports.listeners_of,
            on_finished_on=exports.on_finished_on,
            macro_steps=exports.macro_steps,
            histograms=exports.histograms,
        )
        trace = open_workload("conversation", limit=60, rate_scale=3.0)
        if isinstance(shape, FleetShape):
            report = replay_fleet(
                trace, shape=shape, parts=parts, router=make_router("prefix-aware"), trace_block_size=512
            )
        else:
            report = replay_disaggregated(
                trace,
                shape=shape,
                parts=parts,
                transfer=TransferModel(bytes_per_s=math.inf),
                prefill_router=make_router("prefix-aware"),
                decode_router=make_router("least-outstanding-work"),
                trace_block_size=512,
            )
        exports.publish(report)
    return report


@pytest.mark.parametrize(("shape", "names"), [(ALIKE, NAMES["alike"]), (POOLS, NAMES["prefill"])])
def test_tables_name_the_engine_of_every_row(tmp_path: Path, shape, names: list[str]) -> None:
    report = run(tmp_path, shape, requests_out="r.csv", series_out="s.csv")
    with open(tmp_path / "r.csv", newline="") as file:
        requests = list(csv.DictReader(file))
    finished = Counter(row["engine"] for row in requests)
    assert sum(finished.values()) == 60 == len({row["request_id"] for row in requests})
    assert sum(float(row["ttft_s"]) for row in requests) / 60 == pytest.approx(report.latencies["ttft_s"]["mean"])
    assert sum(float(row["e2e_s"]) for row in requests) / 60 == pytest.approx(report.latencies["e2e_s"]["mean"])
    if shape is ALIKE:
        assert finished == {name: one["requests"]["finished"] for name, one in zip(names, report.replicas, strict=True)}
    cached = sum(int(row["num_cached_tokens"]) for row in requests)
    assert cached == report.prefix_cache["hits_tokens"] > 0
    with open(tmp_path / "s.csv", newline="") as file:
        series = list(csv.DictReader(file))
    assert {row["engine"] for row in series} == set(names)
    for name in names:
        times = [float(row["time_s"]) for row in series if row["engine"] == name]
        assert times == sorted(times)


def last_values(text: str, name: str) -> dict[tuple[str, str], float]:
    """The last sample of a series of each engine, by instance and rank."""
    found = re.findall(
        rf'^{name}{{(?:[^}}]*,)?engine="(.*?)",(?:[^}}]*,)?instance="(.*?)"[^}}]*}} (\S+)', text, re.MULTILINE
    )
    return {(instance, rank): float(value) for rank, instance, value in found}


@pytest.mark.parametrize(("file", "option"), [("p.prom", "prometheus_out"), ("o.txt", "openmetrics_out")])
def test_metrics_have_a_series_for_each_engine(tmp_path: Path, file: str, option: str) -> None:
    report = run(tmp_path, ALIKE, **{option: file})
    text = (tmp_path / file).read_text()
    engines = [(f"replica-{one['replica']}", str(one["data_parallel_rank"])) for one in report.replicas]
    finished = [one["requests"]["finished"] for one in report.replicas]
    assert last_values(text, "vllm:e2e_request_latency_seconds_count") == dict(zip(engines, finished, strict=True))
    gaps = last_values(text, "vllm:inter_token_latency_seconds_count")
    assert sum(gaps.values()) == report.latencies["itl_s"]["count"]
    assert set(last_values(text, "vllm:cache_config_info")) == set(engines)
    # Each metric is one family, whose samples stand together.
    assert text.count("# TYPE vllm:num_requests_running ") == 1


def test_a_request_counts_once_in_the_histograms_of_two_pools(tmp_path: Path) -> None:
    report = run(tmp_path, POOLS, prometheus_out="p.prom")
    families = {family.name: family for family in read_text((tmp_path / "p.prom").read_text())}

    def count(name: str) -> dict[str, float]:
        return {s.labels["instance"]: s.value for s in families[name].samples if s.name.endswith("_count")}

    first, last = count("vllm:time_to_first_token_seconds"), count("vllm:e2e_request_latency_seconds")
    assert first == {"prefill-0": 60, "decode-0": 0, "decode-1": 0}
    assert sum(last.values()) == report.latencies["e2e_s"]["count"] == 60


def test_a_trace_has_a_pair_of_tracks_for_each_engine(tmp_path: Path) -> None:
    report = run(tmp_path, POOLS, perfetto_out="t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(named.values()) == [f"{track} {name}" for name in NAMES["prefill"] for track in ("engine", "requests")]
    steps = Counter(named[event["pid"]] for event in events if event["ph"] == "X")
    assert steps == {
        f"engine {name}": one["steps"] for name, one in zip(NAMES["prefill"], report.replicas, strict=True)
    }
    open_slices = Counter((e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "b")
    assert open_slices == Counter((e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "e")


def test_figures_are_the_same_with_and_without_files(tmp_path: Path) -> None:
    plain = run(tmp_path, POOLS)
    with_files = run(tmp_path, POOLS, requests_out="r.csv", perfetto_out="t.json", openmetrics_out="o.txt")
    assert attrs.asdict(plain)["latencies"] == attrs.asdict(with_files)["latencies"]
    assert plain.kv_transfer == with_files.kv_transfer
