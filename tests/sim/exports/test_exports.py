"""The files of a replay, against a run small enough to follow by hand."""

import csv
import json
import sys
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kvledger.core import AllocatorConfig, FullAttention, InputError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.metrics import RequestRecord
from kvledger.sim.engine.replay import ReplayReport, replay
from kvledger.sim.exports.run_exports import ExportOptions, RunExports
from kvledger.sim.exports.tables import REQUEST_COLUMNS
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest
from prometheus_client.parser import text_string_to_metric_families

# Steps of 100 ms. The first request: tokens at 0.1, 0.2 and 0.3 s. The second arrives at 0.05 s, is admitted at 0.1 s
# and finds the 32 tokens that it shares; tokens at 0.2 and 0.3 s.
BY_HAND = [(0.0, 40, 3, (1, 2)), (0.05, 70, 2, (1, 3, 4))]
MODEL = {"model": "some/model", "kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.9}
POOL = AllocatorConfig(101, [FullAttention(16)], max_model_len=1000, max_num_reqs=16)
# Two requests that outgrow five blocks together.
TIGHT = [(0.0, 32, 30, (1,)), (0.0, 32, 30, (2,))]


def run(requests, folder: Path | None = None, num_blocks: int = 101, macro_steps: bool = True, **options: str):
    allocator = AllocatorConfig(num_blocks, [FullAttention(16)], max_model_len=1000, max_num_reqs=16)
    named = {name: str(folder / file) for name, file in options.items()} if folder else {}
    with RunExports(ExportOptions(**named), allocator, MODEL) as exports:
        report = replay(
            (
                TraceRequest(at, prompt, output, ids, place)
                for place, (at, prompt, output, ids) in enumerate(requests, 1)
            ),
            allocator=allocator,
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            latency=LinearLatency(0.1, 0.0, 0.0),
            trace_block_size=32,
            macro_steps=macro_steps and exports.macro_steps,
            listeners=exports.listeners,
            on_finished=exports.on_finished,
        )
        exports.publish(report)
    return report


def many(count: int) -> list[tuple[float, int, int, tuple[int, ...]]]:
    return [(i * 0.3, 40 + i % 50, 1 + i % 7, (i % 5, 1000 + i, 2000 + i)) for i in range(count)]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def samples(path: Path) -> dict[str, float]:
    """Every sample of a Prometheus file, by its name and the labels that are not the same everywhere."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found[" ".join([sample.name, *(f"{k}={v}" for k, v in sorted(labels.items()))])] = sample.value
    return found


# -- requests and series ---------------------------------------------------------------------------------------------


def test_each_finished_request_has_one_row_with_its_times_and_tokens(tmp_path: Path) -> None:
    run(BY_HAND, tmp_path, requests_out="r.csv")
    assert read_csv(tmp_path / "r.csv") == [
        {
            "request_id": "1",
            "arrival_s": "0.0",
            "queue_time_s": "0.0",
            "ttft_s": "0.1",
            "tpot_s": "0.1",
            "e2e_s": "0.3",
            "num_prompt_tokens": "40",
            "num_output_tokens": "3",
            "num_cached_tokens": "0",
            "num_preemptions": "0",
        },
        {
            "request_id": "2",
            "arrival_s": "0.05",
            "queue_time_s": "0.05",
            "ttft_s": "0.15",
            "tpot_s": "0.1",
            "e2e_s": "0.25",
            "num_prompt_tokens": "70",
            "num_output_tokens": "2",
            "num_cached_tokens": "32",
            "num_preemptions": "0",
        },
    ]


def test_a_single_token_has_no_tpot_in_any_kind_of_file(tmp_path: Path) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        run([(0.0, 10, 1, (1,))], tmp_path, requests_out=f"r.{suffix}")
    assert read_csv(tmp_path / "r.csv")[0]["tpot_s"] == ""
    assert json.loads((tmp_path / "r.jsonl").read_text())["tpot_s"] is None
    assert pq.read_table(tmp_path / "r.parquet").to_pylist()[0]["tpot_s"] is None


def test_a_preempted_request_says_how_often_and_keeps_its_queue_time(tmp_path: Path) -> None:
    report = run(TIGHT, tmp_path, num_blocks=6, requests_out="r.csv")
    rows = read_csv(tmp_path / "r.csv")
    assert sum(int(row["num_preemptions"]) for row in rows) == report.preemptions["total"] > 0
    assert {row["queue_time_s"] for row in rows} == {"0.0"}


@pytest.mark.parametrize("option", ["requests_out", "series_out"])
def test_parquet_csv_and_jsonl_hold_the_same_rows(tmp_path: Path, option: str) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        run(many(60), tmp_path, **{option: f"t.{suffix}"})
    parquet = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert parquet == [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    as_text = [{name: "" if cell is None else str(cell) for name, cell in row.items()} for row in parquet]
    assert as_text == read_csv(tmp_path / "t.csv")
    assert len(parquet) >= 60


def test_the_columns_are_those_of_the_record_and_its_types(tmp_path: Path) -> None:
    run(BY_HAND, tmp_path, requests_out="r.parquet")
    schema = pq.read_schema(tmp_path / "r.parquet")
    assert schema.names == list(REQUEST_COLUMNS) == list(RequestRecord.__annotations__)
    kinds = {"str": "string", "int": "int64", "float": "double", "float | None": "double"}
    assert [str(kind) for kind in schema.types] == [kinds[str(getattr(t, "__name__", t))] for t in record_types()]


def record_types() -> list[object]:
    return list(RequestRecord.__annotations__.values())


def test_the_series_has_the_reports_figures_and_ends_at_rest(tmp_path: Path) -> None:
    report = run(BY_HAND, tmp_path, macro_steps=False, series_out="s.csv")
    rows = read_csv(tmp_path / "s.csv")
    columns = {name: [float(row[name]) for row in rows] for name in rows[0]}
    assert columns == report.series
    assert columns["time_s"] == [0.0, 0.0, 0.1, 0.2, 0.3]
    assert columns["num_requests_running"] == [0, 1, 2, 2, 0]
    # 40 tokens take 3 blocks; 70 tokens take 5, of which 2 are shared
    assert columns["kv_cache_usage"] == [0.0, 0.03, 0.06, 0.06, 0.0]


# -- Prometheus ------------------------------------------------------------------------------------------------------


def test_the_prometheus_text_has_vllms_names_and_the_values_worked_out_by_hand(tmp_path: Path) -> None:
    run(BY_HAND, tmp_path, prometheus_out="p.prom")
    found = samples(tmp_path / "p.prom")
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 110,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:num_preemptions_total": 0,
        "vllm:prompt_tokens_total": 110,
        "vllm:generation_tokens_total": 5,
        "vllm:request_success_total finished_reason=length": 2,
        "vllm:request_success_total finished_reason=stop": 0,
        "vllm:request_success_total finished_reason=abort": 0,
        "vllm:time_to_first_token_seconds_bucket le=0.08": 0,
        # a sample of exactly 0.1 s counts as up to 0.1 s
        "vllm:time_to_first_token_seconds_bucket le=0.1": 1,
        "vllm:time_to_first_token_seconds_bucket le=0.25": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:time_to_first_token_seconds_sum": 0.25,
        "vllm:inter_token_latency_seconds_bucket le=0.075": 0,
        "vllm:inter_token_latency_seconds_bucket le=0.1": 3,
        "vllm:inter_token_latency_seconds_sum": 0.3,
        "vllm:request_time_per_output_token_seconds_bucket le=0.1": 2,
        "vllm:e2e_request_latency_seconds_bucket le=0.3": 2,
        "vllm:e2e_request_latency_seconds_sum": 0.55,
        "vllm:request_queue_time_seconds_sum": 0.05,
        "vllm:request_prefill_time_seconds_sum": 0.2,
        "vllm:request_decode_time_seconds_sum": 0.3,
        "vllm:request_inference_time_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_bucket le=50.0": 1,
        "vllm:request_prompt_tokens_bucket le=100.0": 2,
        "vllm:request_generation_tokens_bucket le=2.0": 1,
        "vllm:request_prefill_kv_computed_tokens_sum": 78,
        # steps of 40, of 1 + 38, and of 2 tokens
        "vllm:iteration_tokens_total_bucket le=1.0": 0,
        "vllm:iteration_tokens_total_bucket le=8.0": 1,
        "vllm:iteration_tokens_total_bucket le=64.0": 3,
        "vllm:iteration_tokens_total_sum": 81,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_every_series_carries_the_labels_that_dashboards_select_by(tmp_path: Path) -> None:
    run(BY_HAND, tmp_path, prometheus_out="p.prom")
    for family in text_string_to_metric_families((tmp_path / "p.prom").read_text()):
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            if family.name == "vllm:cache_config_info":
                facts = {"block_size": "16", "num_gpu_blocks": "101", "enable_prefix_caching": "True"}
                facts |= {"cache_dtype": "fp8", "gpu_memory_utilization": "0.9"}
                assert sample.labels == {"engine": "0", **facts}
            else:
                assert sample.labels["model_name"] == "some/model"


def test_the_histograms_add_up_and_agree_with_the_report(tmp_path: Path) -> None:
    report = run(many(200), tmp_path, num_blocks=60, prometheus_out="p.prom")
    found = samples(tmp_path / "p.prom")
    for family in text_string_to_metric_families((tmp_path / "p.prom").read_text()):
        if family.type == "histogram":
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == found[f"{family.name}_count"] > 0
    assert_totals_agree(report, found)


def assert_totals_agree(report: ReplayReport, found: dict[str, float]) -> None:
    seconds = {"ttft_s": "time_to_first_token", "itl_s": "inter_token_latency", "e2e_s": "e2e_request_latency"}
    for name, metric in {**seconds, "tpot_s": "request_time_per_output_token"}.items():
        figures = report.latencies[name]
        assert found[f"vllm:{metric}_seconds_count"] == figures["count"]
        assert found[f"vllm:{metric}_seconds_sum"] == pytest.approx(figures["mean"] * figures["count"], rel=1e-12)
    assert found["vllm:prefix_cache_queries_total"] == report.prefix_cache["queries_tokens"]
    assert found["vllm:prefix_cache_hits_total"] == report.prefix_cache["hits_tokens"]
    assert found["vllm:request_success_total finished_reason=length"] == report.requests["finished"]
    assert found["vllm:num_preemptions_total"] == report.preemptions["total"]
    assert found["vllm:request_num_preemptions_sum"] == report.preemptions["total"]
    assert found["vllm:iteration_tokens_total_count"] == report.steps
    computed = report.throughput["computed_tokens_per_s"] * report.simulated_seconds
    assert found["vllm:iteration_tokens_total_sum"] == pytest.approx(computed)
    output = report.throughput["output_tokens_per_s"] * report.simulated_seconds
    assert found["vllm:generation_tokens_total"] == pytest.approx(output)
    assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]


def test_the_prometheus_text_is_the_same_with_macro_steps_and_without(tmp_path: Path) -> None:
    run(many(80), tmp_path, prometheus_out="macro.prom")
    run(many(80), tmp_path, macro_steps=False, prometheus_out="single.prom")
    assert (tmp_path / "macro.prom").read_bytes() == (tmp_path / "single.prom").read_bytes()


# -- all of them -----------------------------------------------------------------------------------------------------

EVERY_FILE = {
    "requests_out": "r.parquet",
    "series_out": "s.parquet",
    "prometheus_out": "p.prom",
    "perfetto_out": "t.json.gz",
}


def test_the_same_run_writes_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        run(many(50), tmp_path / folder, **EVERY_FILE)
    for name in EVERY_FILE.values():
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == sorted(EVERY_FILE.values())


def test_a_run_reports_the_same_with_files_and_without(tmp_path: Path) -> None:
    with_files, without = run(many(50), tmp_path, **EVERY_FILE).to_json(), run(many(50)).to_json()
    with_files.pop("timing"), without.pop("timing")
    assert with_files == without


def test_files_take_no_memory_that_grows_with_the_run(tmp_path: Path) -> None:
    requests = [(i * 8.0, 40, 80, (i % 5, 1000 + i)) for i in range(100)]
    files = {"requests_out": "r.csv", "series_out": "s.jsonl", "perfetto_out": "t.json"}
    run(BY_HAND, tmp_path, **files)
    without, with_files = traced_peak_bytes(requests), traced_peak_bytes(requests, tmp_path, **files)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 1_400_000
    assert with_files - without < 300_000


def traced_peak_bytes(*arguments, **options) -> int:
    tracemalloc.start()
    try:
        run(*arguments, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_run_that_fails_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "r.parquet").write_text("from before")
    broken = [*many(5), (1.0, 10, 1, (1,)), (0.5, -1, 1, (2,))]
    with pytest.raises(InputError):
        run(broken, tmp_path, **EVERY_FILE)
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]
    assert (tmp_path / "r.parquet").read_text() == "from before"


def test_an_existing_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("from before")
    (tmp_path / "r.csv").chmod(0o640)
    run(BY_HAND, tmp_path, requests_out="r.csv")
    assert len(read_csv(tmp_path / "r.csv")) == 2
    assert (tmp_path / "r.csv").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests_out": "r.xlsx"}, "the name must end in .csv, .jsonl or .parquet"),
        ({"series_out": "series"}, "--series-out series: the name must end in"),
        ({"perfetto_out": "no/such/t.json"}, "create it first"),
        ({"prometheus_out": "."}, "exists and is not a file"),
        ({"requests_out": "t.csv", "series_out": "t.csv"}, "is also the file of --requests-out"),
        ({"requests_out": "r.csv", "perfetto_out": "in.csv"}, "is an input of this run"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, options, message: str) -> None:
    (tmp_path / "in.csv").write_text("the trace")
    named = {name: str(tmp_path / file) for name, file in options.items()}
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        RunExports(ExportOptions(**named), POOL, {}, inputs=[str(tmp_path / "in.csv")])
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_a_missing_library_is_named_with_the_extra_that_brings_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"kvledger\[log\]"):
        RunExports(ExportOptions(requests_out=str(tmp_path / "r.parquet")), POOL, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_reported_and_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    from kvledger.sim.exports import tables as output_file

    class OnFullDisk(output_file._CheckedFile):
        def __init__(self, path: Path, option: str) -> None:
            path.touch()
            super().__init__(Path("/dev/full"), option)

    monkeypatch.setattr(output_file, "_CheckedFile", OnFullDisk)
    (tmp_path / "r.csv").write_text("from before")
    with pytest.raises(InputError, match="--requests-out: No space left on device"):
        run(BY_HAND, tmp_path, requests_out="r.csv")
    assert (tmp_path / "r.csv").read_text() == "from before"
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]
