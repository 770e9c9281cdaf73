"""Hundreds of requests at once on a pool that is too small for them, from clients of every temper."""

import asyncio
import gc
import tracemalloc

import pytest
from kvledger.backends.serving.engine.request import LiveRequest

from tests.backends.serving.http.storm_clients import check_outcomes, wave


def live_requests():
    return [each for each in gc.get_objects() if type(each) is LiveRequest]


def run_storm(make_server, tmp_path, num_requests, num_at_once, traces_memory):
    pytest.importorskip("pyarrow", reason="the log of the run needs pyarrow")
    from kvledger.backends.serving.engine.recording import LiveRecording
    from kvledger.backends.sinks import FlushPolicy
    from kvledger.sim.logs.verification import verify_log
    from kvledger.sim.traces.logged import open_event_log

    def recording(allocator, scheduler):
        flush = FlushPolicy(every_commits=50)
        return LiveRecording.create(tmp_path / "log", flush=flush, allocator=allocator, scheduler=scheduler)

    running = make_server(num_blocks=28, max_queued_requests=16, max_open_requests=48, recording=recording)
    num_objects, used_bytes = [], []
    if traces_memory:
        tracemalloc.start()
    try:
        for _ in range(4):
            outcomes = asyncio.run(wave(running.port, 0, num_requests // 4, num_at_once))
            check_outcomes(outcomes)
            running.wait_until_idle(30)
            gc.collect()
            num_objects.append(len(gc.get_objects()))
            used_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    stats = running.engine.stats.scheduler
    assert stats.num_preemptions > 0 and stats.prefix_hits_tokens > 0 and stats.num_aborted > 0
    assert len(live_requests()) <= 8  # at most those of the engine's last step
    # The first wave fills caches and imports; after it nothing may add up.
    assert num_objects[-1] - num_objects[1] < 500, num_objects
    assert used_bytes[-1] - used_bytes[1] < 100_000, used_bytes
    running.stop()
    assert running.engine.allocator.pool.num_held_blocks == 0
    found = verify_log(open_event_log(tmp_path / "log"), 50)
    assert found.is_sound, found
    return running, stats


def test_a_storm_of_requests_leaves_nothing_behind(make_server, tmp_path):
    run_storm(make_server, tmp_path, 156, 32, traces_memory=False)


@pytest.mark.slow
def test_a_long_storm_of_requests_leaves_nothing_behind(make_server, tmp_path):
    run_storm(make_server, tmp_path, 1040, 60, traces_memory=True)
