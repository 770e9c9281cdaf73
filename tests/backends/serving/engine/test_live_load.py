"""Under load: hundreds of requests from several threads on a tight pool, cancels at any time, slow readers."""

import gc
import random
import threading
import time
import tracemalloc

import pytest

pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("pyarrow", reason="event logs need pyarrow")

from kvledger.backends.serving import LiveRecording, QueueFullError, SamplingSettings
from kvledger.backends.sinks import FlushPolicy, LogReader
from kvledger.sim.logs.live_rerun import run_live_again
from kvledger.sim.logs.verification import verify_log
from kvledger.testing import violations

from tests.backends.serving.cache_reader import VOCAB_SIZE

pytestmark = pytest.mark.torch

NUM_CLIENTS = 6
REQUESTS_A_CLIENT = 50
GREEDY = {"temperature": 0}


class Client(threading.Thread):
    """Sends requests one after the other, several at a time unread; leaves some early, reads some slowly."""

    def __init__(self, engine, number):
        super().__init__()
        self.engine, self.random = engine, random.Random(number)
        self.served, self.num_refused, self.errors = [], 0, []

    def run(self):
        try:
            for _ in range(REQUESTS_A_CLIENT):
                self._one()
        except BaseException as error:
            self.errors.append(error)

    def _one(self):
        start = self.random.randrange(5)
        prompt = list(range(start, start + self.random.randrange(1, 25)))
        max_tokens = self.random.choice([1, 3, 12, 20])
        request = self._submit(prompt, SamplingSettings(max_tokens=max_tokens, **GREEDY))
        self.served.append((prompt, max_tokens, request))
        what = self.random.randrange(5)
        if what == 0:
            request.cancel()
        elif what == 1:  # leaves in the middle
            with request:
                for _, _ in zip(range(2), request, strict=False):
                    pass
        elif what == 2:  # reads slowly
            for _ in request:
                time.sleep(0.002)
        elif what == 3:
            request.result(60)

    def _submit(self, prompt, settings):
        while True:
            try:
                return self.engine.submit(prompt, settings)
            except QueueFullError:
                self.num_refused += 1
                time.sleep(0.002)


def test_hundreds_of_requests_on_a_tight_pool_all_end_and_leave_nothing(make_engine, alone, tmp_path) -> None:
    engine = make_engine(
        num_blocks=16,
        max_queued_requests=8,
        recording=lambda allocator, scheduler: LiveRecording.create(
            tmp_path / "run.log", flush=FlushPolicy(every_ms=20), allocator=allocator, scheduler=scheduler
        ),
    )
    clients = [Client(engine, number) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
        assert not client.is_alive() and client.errors == []
    engine.shutdown(drain=True, timeout_s=60)

    served = [each for client in clients for each in client.served]
    assert len(served) == NUM_CLIENTS * REQUESTS_A_CLIENT
    expected = {}
    for prompt, max_tokens, request in served:
        result = request.result(0)
        whole = expected.setdefault((tuple(prompt), 20), alone(prompt, 20))
        assert result.token_ids == whole[: len(result.token_ids)]
        assert result.finish_reason == ("length" if len(result.token_ids) == max_tokens else "abort")
    stats = engine.stats
    assert stats.num_unended == stats.num_queued == stats.num_running == 0 and stats.kv_cache_usage == 0
    assert stats.scheduler.num_finished + stats.scheduler.num_aborted == len(served)
    assert stats.scheduler.num_preemptions and stats.scheduler.num_aborted
    assert sum(client.num_refused for client in clients) > 0
    assert list(violations(engine.allocator.state)) == []
    assert not engine._thread.is_alive() and not engine._driver._generations

    reader = LogReader(tmp_path / "run.log")
    assert verify_log(reader, checked_every=20).is_sound
    found = run_live_again(reader)
    assert found.is_equal and found.requests == len(served) and found.steps == stats.num_steps


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_memory_does_not_grow_with_the_requests_that_were_served(make_engine, policy) -> None:
    engine = make_engine(policy=policy, max_num_seqs=32, max_num_batched_tokens=256, num_blocks=200, start=False)
    engine._runner._answer = lambda row, length: [0.0] * VOCAB_SIZE  # what is answered does not matter here

    def serve(first, count):
        for number in range(first, first + count):
            request = engine.submit([number % 50, number // 50 % 50, number // 2500], SamplingSettings(max_tokens=1))
            if number % 7 == 0:
                request.cancel()
            if number % 100 == 99:
                while engine.advance():
                    pass
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(0, 400)
        after = serve(400, 1000)
    finally:
        tracemalloc.stop()
    assert engine.stats.scheduler.num_finished > 1000
    # A thousand requests of a few kilobytes each came and went: what stays is less than 40 bytes of each.
    assert after - before < 40_000
