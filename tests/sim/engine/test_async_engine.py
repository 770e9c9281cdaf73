"""Asynchronous scheduling: who joins which step, and that nothing else changes."""

import pytest
import simpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvledger.backends.sim_backend import SimBackend
from kvledger.core.allocator.allocator import KVCacheAllocator
from kvledger.core.allocator.config import AllocatorConfig
from kvledger.core.cache_kinds import FullAttention
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.types import Request
from kvledger.sim.engine.engine import AsyncSchedulingEngine, SimulatedEngine
from kvledger.sim.engine.metrics import Recorder
from kvledger.sim.latency.linear import LinearLatency


def _run(arrivals: list[tuple[float, int, int]], *, engine=AsyncSchedulingEngine, macro_steps: bool = True, blocks=200):
    """Serve (arrival, prompt, output) with steps of 100 ms; the recorder, the scheduler and the engine afterwards."""
    env = simpy.Environment()
    recorder = Recorder(lambda: int(env.now), 8)
    backend = SimBackend(LinearLatency(0.1, 0.0, 0.0))
    config = AllocatorConfig(num_blocks=blocks, groups=[FullAttention(16)], max_model_len=1_024, max_num_reqs=8)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        KVCacheAllocator(config, sinks=[backend, recorder]),
    )
    served = engine(env, scheduler, backend, recorder, macro_steps)
    requests = [
        Request(str(place), num_prompt_tokens=prompt, max_tokens=output, arrival=arrival)
        for place, (arrival, prompt, output) in enumerate(arrivals)
    ]
    env.process(served.arrivals(requests))
    env.run()
    return recorder, scheduler, served


def _ms(sketch) -> float:
    return sketch.maximum / 1e6


def test_an_idle_engine_starts_a_request_at_once():
    recorder, _, _ = _run([(0.05, 10, 1)])
    assert _ms(recorder.latencies.ttft_ns) == pytest.approx(100)


@pytest.mark.parametrize("macro_steps", [True, False])
def test_a_request_that_arrives_during_a_step_joins_the_one_after_the_next(macro_steps: bool):
    # Steps start at 0.0, 0.1, ...; the second request arrives 30 ms into the fourth one: 70 + 100 + 100 ms.
    recorder, _, _ = _run([(0.0, 10, 20), (0.33, 10, 1)], macro_steps=macro_steps)
    assert _ms(recorder.latencies.ttft_ns) == pytest.approx(270)
    synchronous, _, _ = _run([(0.0, 10, 20), (0.33, 10, 1)], engine=SimulatedEngine, macro_steps=macro_steps)
    assert _ms(synchronous.latencies.ttft_ns) == pytest.approx(170)


def test_a_request_that_arrives_during_the_last_step_starts_when_it_ends():
    recorder, _, _ = _run([(0.0, 10, 3), (0.25, 10, 1)])
    assert _ms(recorder.latencies.ttft_ns) == pytest.approx(150)


def test_running_requests_are_not_slowed_down():
    times = []
    for engine in (AsyncSchedulingEngine, SimulatedEngine):
        recorder, _, _ = _run([(0.0, 10, 20), (0.33, 10, 20)], engine=engine)
        times.append((recorder.latencies.itl_ns.maximum, recorder.latencies.itl_ns.count))
    assert times[0] == times[1] == (100_000_000, 38)


def test_a_place_that_is_given_back_is_taken_by_the_step_after_the_next_one():
    """Eight requests hold all places; one ends at 0.3 s, when the next step is decided."""
    arrivals = [(0.0, 10, 3), *[(0.0, 10, 20)] * 7, (0.05, 10, 1)]
    recorder, _, _ = _run(arrivals)
    assert _ms(recorder.latencies.ttft_ns) == pytest.approx(500 - 50)
    synchronous, _, _ = _run(arrivals, engine=SimulatedEngine)
    assert _ms(synchronous.latencies.ttft_ns) == pytest.approx(400 - 50)


def test_blocks_that_are_given_back_are_taken_by_the_step_after_the_next_one():
    recorder, scheduler, _ = _run([(0.0, 100, 3), (0.0, 40, 20), (0.05, 100, 1)], blocks=14)
    assert _ms(recorder.latencies.ttft_ns) == pytest.approx(500 - 50)
    assert scheduler.stats.num_preemptions == 0


def test_a_request_whose_last_token_is_in_flight_when_it_is_preempted_finishes():
    """The newest of two requests loses its blocks in the step after the one that samples its last token."""
    recorder, scheduler, _ = _run([(0.0, 47, 30), (0.0, 16, 2)], blocks=6)
    assert scheduler.stats.num_finished == 2
    assert scheduler.stats.num_preemptions == 1
    assert recorder.latencies.e2e_ns.count == 2


def test_what_can_never_fit_is_refused_while_the_engine_runs_and_while_it_idles():
    _, scheduler, engine = _run([(0.0, 10, 5), (0.05, 400, 5), (9.0, 400, 5), (9.1, 10, 1)], blocks=20)
    assert len(engine.rejections) == 2
    assert scheduler.stats.num_finished == 2


_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 4_000), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=12
).map(lambda rows: [(ms / 1_000, prompt, output) for ms, prompt, output in sorted(rows)])


@settings(deadline=None, max_examples=60)
@given(arrivals=_ARRIVALS, blocks=st.sampled_from([14, 30, 200]))
@example(arrivals=[(0.0, 1, 1), (0.0, 81, 1), (0.0, 96, 2)], blocks=14)  # the only one left preempts itself
def test_macro_steps_change_no_figure(arrivals, blocks):
    figures = []
    for macro_steps in (True, False):
        recorder, scheduler, _ = _run(arrivals, macro_steps=macro_steps, blocks=blocks)
        sketches = (recorder.latencies.ttft_ns, recorder.latencies.itl_ns, recorder.latencies.e2e_ns)
        figures.append(
            [(s.count, s.total, s.maximum) for s in sketches]
            + [(recorder.num_steps, scheduler.stats.num_finished, scheduler.stats.num_preemptions)]
        )
    assert figures[0] == figures[1]
    assert figures[0][-1][1] == len(arrivals)
