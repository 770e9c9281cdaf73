"""Searches over real replays: runs that end early, bounds of an idle engine, rates, and runs that are kept."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from kvledger.core import InputError
from kvledger.sim.engine.metrics import RequestRecord
from kvledger.sim.engine.replay import replay
from kvledger.sim.scenario.engine import engine_of
from kvledger.sim.scenario.scenario import Scenario
from kvledger.sim.scenario.traffic import open_traffic
from kvledger.sim.search.idle_engine import idle_bound, idle_records
from kvledger.sim.search.size_question import SizeOptions, SizeQuestion
from kvledger.sim.search.sizing import FleetSearch, RateSearch, SearchWatch, Setting, try_fleet
from kvledger.sim.search.slo import TOLERANCE, Slo, SloTally

CODE = {"workload": "code", "limit": 150, "rate_scale": 15.0}
CHAT = {"workload": "conversation", "limit": 60, "rate_scale": 4.0}
POOL = {"num_gpu_blocks_override": 3000, "block_size": 64, "max_num_seqs": 32}
MODEL = {"model": "llama-3.1-70b", "gpu": "H100", "tensor_parallel_size": 4, "block_size": 64}


def setting(slo: Slo, **options: Any) -> Setting:
    values = Scenario(**options)
    return Setting(open_trace=lambda: open_traffic(values), parts=engine_of(values).parts, slo=slo)


SLOS = {
    "ttft": Slo(ttft_p99_s=0.4),
    "tpot": Slo(tpot_p99_s=0.05),
    "both": Slo(ttft_p99_s=0.45, tpot_p99_s=0.06),
    "goodput": Slo(goodput_share=0.9, ttft_s=0.3, tpot_s=0.04),
}


@pytest.mark.parametrize("slo", SLOS.values(), ids=SLOS.keys())
def test_a_run_that_may_end_early_has_the_verdict_of_the_full_replay(slo: Slo) -> None:
    asked = setting(slo, **CODE, **POOL)
    num_stopped = 0
    for num_replicas in range(1, 6):
        full = try_fleet(asked, num_replicas)
        early = try_fleet(asked, num_replicas, num_requests=150)
        assert full.figures["requests"]["finished"] == 150
        assert early.met == full.met
        stopped = "stopped_after_requests" in early.figures
        assert stopped or early == full
        num_stopped += stopped
    assert num_stopped > 0


class OneByOne:
    """A trace whose requests come so far apart that each finds the engine idle."""

    def __init__(self, trace: Any, gap_s: float) -> None:
        self._trace, self._gap_s = trace, gap_s
        self.info = trace.info

    def __iter__(self) -> Any:
        for index, row in enumerate(self._trace):
            yield attrs.evolve(row, arrival_s=index * self._gap_s)


times = st.sampled_from((0.1, 0.5, 1.0, 2.0))
records = st.lists(st.tuples(times, st.none() | times), min_size=1, max_size=220)
slos = st.one_of(
    st.builds(Slo, ttft_p99_s=times, tpot_p99_s=st.none() | times),
    st.builds(Slo, goodput_share=st.sampled_from((0.3, 0.5, 0.99, 1.0)), ttft_s=times, tpot_s=st.none() | times),
    st.builds(Slo, tpot_p99_s=times),
)


@for_all(slos, records, st.integers(0, 3))
def test_what_is_lost_early_is_lost_in_the_end(slo: Slo, rows: list[tuple[float, float | None]], refused: int) -> None:
    tally, lost_at_any_time = SloTally(slo), False
    for ttft_s, tpot_s in rows:
        tally.finished(RequestRecord("r", 0.0, 0.0, ttft_s, tpot_s, ttft_s, 10, 1 if tpot_s is None else 5, 0, 0))
        lost_at_any_time = lost_at_any_time or tally.is_lost(len(rows) + refused)
    if lost_at_any_time:
        assert not tally.verdict(len(rows) + refused).met


@pytest.mark.parametrize(
    "options",
    [
        {**CHAT, **POOL},
        {**CHAT, **POOL, "enable_prefix_caching": False},
        {**CHAT, **MODEL},
        {**CHAT, **MODEL, "max_num_batched_tokens": 2048, "long_prefill_token_threshold": 1024},
        {**CODE, **POOL},
        {**CODE, **POOL, "async_scheduling": True},
    ],
    ids=["linear", "without cache", "roofline", "small steps", "no ids", "async"],
)
@pytest.mark.parametrize("gap_s", [None, 1e4], ids=["busy", "one by one"])
def test_no_request_is_served_sooner_than_on_an_idle_engine(options: dict[str, Any], gap_s: float | None) -> None:
    values = Scenario(**options)
    parts = engine_of(values).parts
    trace: Any = open_traffic(values)
    if gap_s is not None:
        trace = OneByOne(trace, gap_s)
    floor = {record.request_id: record for record in idle_records(trace, parts)}
    served: list[RequestRecord] = []
    replay(
        trace,
        allocator=parts.allocator,
        scheduler=parts.scheduler,
        latency=parts.latency,
        trace_block_size=trace.info.trace_block_size,
        closed_loop=False,
        async_scheduling=parts.async_scheduling,
        http_s=parts.http_s,
        on_finished=served.append,
    )
    assert len(served) == len(floor)
    # Simulated time is in whole nanoseconds.
    assert all(record.ttft_s >= floor[record.request_id].ttft_s - 1e-7 for record in served)
    assert all((record.tpot_s or 0) >= (floor[record.request_id].tpot_s or 0) - 1e-7 for record in served)
    if gap_s is not None:  # and where nobody is in the way, it is that soon
        near = [record.ttft_s <= 1.001 * floor[record.request_id].ttft_s for record in served]
        assert sum(near) >= 0.9 * len(near)


def test_the_bound_tells_how_many_requests_an_idle_engine_serves_in_time() -> None:
    values = Scenario(**CHAT, **MODEL)
    parts = engine_of(values).parts
    bound = idle_bound(open_traffic(values), parts, Slo(ttft_p99_s=1.0))
    assert bound is not None
    in_time = [record.ttft_s <= 1.0 for record in idle_records(open_traffic(values), parts)]
    assert 0 < bound.share_in_time == sum(in_time) / len(in_time) < 1
    assert not bound.verdict.met
    assert not try_fleet(setting(Slo(ttft_p99_s=1.0), **CHAT, **MODEL), 64).met


def test_the_highest_rate_is_met_and_a_tolerance_more_is_not_both_by_full_replays() -> None:
    found = RateSearch(num_replicas=2).find(
        setting(SLOS["goodput"], **CODE, **POOL), start=None, probes=1, watch=SearchWatch()
    )
    assert found.answer is not None
    above = min(trial.value for trial in found.trials if not trial.met and trial.value > found.answer)
    assert above <= found.answer * (1 + TOLERANCE) * (1 + 1e-9)
    for value, met in ((found.answer, True), (above, False)):
        trial = found.trial(value)
        assert trial.met == met
        assert trial.figures["requests"]["finished"] == 150
        assert trial.verdict.figures["goodput_share"]["value"] is not None


def test_a_kept_run_is_read_and_not_run_again(tmp_path: Path) -> None:
    asked = attrs.evolve(setting(SLOS["ttft"], **CODE, **POOL), kept_in=str(tmp_path), named={"question": 1})
    search = FleetSearch(most=8)
    first = search.find(asked, start=None, probes=1, watch=SearchWatch())
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == len(first.trials) + 1  # the run below the answer ended early first

    def no_trace() -> Any:
        values = Scenario(**CODE)
        no_trace.opened += 1  # type: ignore[attr-defined]
        return open_traffic(values)

    no_trace.opened = 0  # type: ignore[attr-defined]
    again = search.find(attrs.evolve(asked, open_trace=no_trace), start=None, probes=1, watch=SearchWatch())
    assert again.answer == first.answer
    assert [trial.as_dict() for trial in again.trials] == [trial.as_dict() for trial in first.trials]
    assert no_trace.opened == 1  # type: ignore[attr-defined]  # to count its requests
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == kept
    other = attrs.evolve(asked, named={"question": 2})
    try_fleet(other, 1, num_requests=150)
    assert len(list(tmp_path.iterdir())) == len(kept) + 1


def test_a_kept_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    asked = attrs.evolve(setting(SLOS["ttft"], **CODE, **POOL), kept_in=str(tmp_path), named={"question": 1})
    try_fleet(asked, 1, num_requests=150)
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    with pytest.raises(InputError, match="is not a kept run"):
        try_fleet(asked, 1, num_requests=150)


def test_the_name_of_a_kept_run_follows_the_files_that_its_options_name(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    asked = SizeOptions(slo_ttft_p99=2, keep="somewhere")

    def named(config: dict[str, object]) -> str:
        model.write_text(json.dumps(config))
        scenario = Scenario(workload="code", model=str(model), gpu="H100", kv_cache_memory_bytes="12GiB")
        question = SizeQuestion(scenario=scenario, asked=asked)
        return str(question.setting(engine_of(Scenario(**POOL)), 2, None).named)

    assert named({"of": "one model"}) != named({"of": "another"})
