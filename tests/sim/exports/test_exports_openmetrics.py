"""The metrics over time: what each scrape saw, and a document that Prometheus can read."""

import itertools
import re
from pathlib import Path

import pytest
from kvledger.core import AllocatorConfig, FullAttention, InputError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.replay import replay
from kvledger.sim.exports.run_exports import ExportOptions, RunExports
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

START = 1_790_000_000
POOL = AllocatorConfig(101, [FullAttention(16)], max_model_len=1000, max_num_reqs=16)
FACTS = {"model": 'a "quoted" model', "kv_cache_dtype": "auto", "gpu_memory_utilization": 0.9}
# Steps of 100 ms: done at 0.3 s, idle, then from 100 to 100.2 s.
IDLE_BETWEEN = [(0.0, 40, 3, (1, 2)), (0.05, 70, 2, (1, 3, 4)), (100.0, 10, 2, (5,))]
BUSY = [(i * 0.37, 40 + i, 20, (i % 5, 1000 + i)) for i in range(120)]


def run(requests, folder: Path, async_scheduling: bool = False):
    options = ExportOptions(
        openmetrics_out=str(folder / "p.om"), openmetrics_start=START, prometheus_out=str(folder / "p.prom")
    )
    with RunExports(options, POOL, FACTS) as exports:
        report = replay(
            (
                TraceRequest(at, prompt, output, ids, place)
                for place, (at, prompt, output, ids) in enumerate(requests, 1)
            ),
            allocator=POOL,
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            latency=LinearLatency(0.1, 0.0, 0.0),
            trace_block_size=32,
            async_scheduling=async_scheduling,
            macro_steps=exports.macro_steps,
            listeners=exports.listeners,
        )
        exports.publish(report)
    return report


def scrapes(path: Path) -> dict[float, dict[tuple, float]]:
    """What each scrape saw: seconds from the start -> (name, labels) -> value.

    Each is read as a document of its own: the parser keeps, of a histogram, the first time only.
    """
    lines = path.read_text().splitlines()
    times = dict.fromkeys(line.rsplit(" ", 1)[1] for line in lines if not line.startswith("#"))
    found = {}
    for time in times:
        document = "\n".join(line for line in lines if line.startswith("#") or line.endswith(f" {time}"))
        samples = [sample for family in read_openmetrics(document + "\n") for sample in family.samples]
        found[round(float(time) - START, 6)] = {key_of(sample): sample.value for sample in samples}
    return found


def key_of(sample) -> tuple:
    return sample.name, tuple(sorted(sample.labels.items()))


def column(path: Path, name: str, **labels: str) -> list[float]:
    return [
        next(value for (n, own), value in seen.items() if n == name and labels.items() <= dict(own).items())
        for _, seen in sorted(scrapes(path).items())
    ]


def test_an_idle_engine_is_scraped_at_the_interval_and_the_end_is_scraped_too(tmp_path: Path) -> None:
    run(IDLE_BETWEEN, tmp_path)
    assert sorted(scrapes(tmp_path / "p.om")) == [0, 15, 30, 45, 60, 75, 90, 100.2]
    generated = column(tmp_path / "p.om", "vllm:generation_tokens_total")
    assert generated == [0, 5, 5, 5, 5, 5, 5, 7]
    finished = column(tmp_path / "p.om", "vllm:request_success_total", finished_reason="length")
    assert finished == [0, 2, 2, 2, 2, 2, 2, 3]
    first_tokens = column(tmp_path / "p.om", "vllm:time_to_first_token_seconds_bucket", le="0.1")
    assert first_tokens == [0, 1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_busy_engine_is_scraped_at_its_first_decision_of_each_interval(tmp_path: Path, async_scheduling) -> None:
    report = run(BUSY, tmp_path, async_scheduling)
    times = sorted(scrapes(tmp_path / "p.om"))
    assert times[-1] == pytest.approx(report.simulated_seconds)
    for number, time in enumerate(times[:-1]):
        assert 15 * number <= time < 15 * number + 0.1 + 1e-6
    assert len(times) == report.simulated_seconds // 15 + 2
    assert max(column(tmp_path / "p.om", "vllm:num_requests_running")) > 1
    assert max(column(tmp_path / "p.om", "vllm:kv_cache_usage_perc")) > 0


def test_counters_never_fall_and_the_last_scrape_is_the_final_text(tmp_path: Path) -> None:
    run(BUSY, tmp_path)
    seen = [values for _, values in sorted(scrapes(tmp_path / "p.om").items())]
    counted = [key for key in seen[0] if re.search(r"_(total|bucket|count|sum)$", key[0])]
    assert len(counted) > 250
    for earlier, later in itertools.pairwise(seen):
        assert all(earlier[key] <= later[key] for key in counted)
    text = (tmp_path / "p.prom").read_text()
    final = {key_of(sample): sample.value for family in read_text(text) for sample in family.samples}
    assert as_numbers(seen[-1]) == as_numbers(final)


def as_numbers(samples: dict[tuple, float]) -> dict[tuple, float]:
    """Boundaries as numbers: the two formats spell 1000000 differently."""
    return {
        (name, tuple((label, float(value) if label == "le" else value) for label, value in labels)): number
        for (name, labels), number in samples.items()
    }


def test_the_document_ends_as_the_format_asks_and_quotes_what_it_must(tmp_path: Path) -> None:
    run(IDLE_BETWEEN, tmp_path)
    text = (tmp_path / "p.om").read_text()
    assert text.endswith("\n# EOF\n")
    assert 'model_name="a \\"quoted\\" model"' in text
    assert {dict(labels).get("model_name", FACTS["model"]) for _, labels in scrapes(tmp_path / "p.om")[0]} == {
        FACTS["model"]
    }


def test_samples_of_one_series_stand_together_in_order_of_time(tmp_path: Path) -> None:
    run(BUSY, tmp_path)
    names = [line.split("{")[0] for line in (tmp_path / "p.om").read_text().splitlines() if not line.startswith("#")]
    groups = [re.sub(r"_(bucket|count|sum)$", "", name) for name in names]
    assert len([g for i, g in enumerate(groups) if i == 0 or groups[i - 1] != g]) == len(set(groups))


def test_samples_without_a_time_are_refused(tmp_path: Path) -> None:
    for options in ({"openmetrics_out": str(tmp_path / "p.om")}, {"openmetrics_start": START}):
        with pytest.raises(InputError, match="--openmetrics-out and --openmetrics-start go together"):
            RunExports(ExportOptions(**options), POOL, {})
    assert list(tmp_path.iterdir()) == []
