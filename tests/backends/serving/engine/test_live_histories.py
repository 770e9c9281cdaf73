"""Any history of submitting, cancelling, stepping and shutting down: tokens are right, and nothing stays held."""

import tempfile

import pytest

pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("pyarrow", reason="event logs need pyarrow")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvledger.backends.serving import (
    EngineFailedError,
    EngineStoppedError,
    LiveRecording,
    QueueFullError,
    SamplingSettings,
)
from kvledger.backends.serving.sampling.sampling import NextToken, choose_tokens, uniform
from kvledger.backends.sinks import FlushPolicy, LogReader
from kvledger.core import DoesNotFitError, EventLog
from kvledger.sim.logs.live_rerun import run_live_again
from kvledger.testing import violations

from tests.backends.serving.cache_reader import logits_of, make_reading_engine

pytestmark = pytest.mark.torch

MAX_QUEUED = 6
STOP_TOKEN = 7


def defined(prompt, each, length):
    """The first tokens of a request by the model's definition and its own draws."""
    import torch

    tokens = list(prompt)
    for index in range(length):
        logits = torch.from_numpy(logits_of(tokens))[None]
        (chosen,) = choose_tokens(logits, [NextToken(each, uniform(each.seed, index), None)]).wait()
        tokens.append(chosen.token_id)
    return tuple(tokens[len(prompt) :])


SUBMISSIONS = st.tuples(
    st.sampled_from([0, 0, 1]),
    st.integers(1, 20),
    st.sampled_from([1, 5, 20, 24]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([None, None, "a"]),
    st.integers(-1, 1),
    st.sampled_from([1, 1, 1, 2, 3]),
)


class LiveHistories(RuleBasedStateMachine):
    """An engine without a thread, on a clock that a step moves on."""

    @initialize(
        windowed=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_blocks=st.sampled_from([12, 20]),
        max_num_seqs=st.sampled_from([2, 5]),
        enable_caching=st.sampled_from([True, True, False]),
    )
    def start(self, windowed, policy, num_blocks, max_num_seqs, enable_caching):
        self.now_ns = 0
        self.log = EventLog()
        self.folder = tempfile.TemporaryDirectory()
        self.ended = []
        self.engine = make_reading_engine(
            windowed=windowed,
            policy=policy,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8,
            enable_caching=enable_caching,
            max_queued_requests=MAX_QUEUED,
            sinks=[self.log],
            recording=self._recording,
            on_request_ended=self.ended.append,
            clock_ns=lambda: self.now_ns,
            start=False,
        )
        self.engine._runner.on_step = self._step_takes_a_second
        self.requests = []
        self.cancelled = set()
        self.stopped = self.failed = False

    def _recording(self, allocator, scheduler):
        flush = FlushPolicy(every_commits=1000)
        return LiveRecording.create(self.folder.name, flush=flush, allocator=allocator, scheduler=scheduler)

    def _step_takes_a_second(self, _step):
        self.now_ns += 10**9

    @rule(several=st.lists(SUBMISSIONS, min_size=1, max_size=5))
    def submit(self, several):
        for start, length, max_tokens, temperature, salt, priority, num_samples in several:
            self._submit(list(range(start, start + length)), max_tokens, temperature, salt, priority, num_samples)

    def _submit(self, prompt, max_tokens, temperature, salt, priority, num_samples):
        settings = [
            SamplingSettings(
                max_tokens=max_tokens, temperature=temperature, seed=len(self.requests) + sample,
                stop_token_ids=[STOP_TOKEN],
            )
            for sample in range(num_samples)
        ]  # fmt: skip
        if self.engine.scheduler.config.policy == "fcfs":
            priority = 0
        try:
            requests = self.engine.submit_samples(prompt, settings, cache_salt=salt, priority=priority)
        except QueueFullError:
            waiting = [each for each, *_ in self.requests if each.started_ns is None and not each.has_ended]
            assert len(waiting) + num_samples > MAX_QUEUED
        except EngineFailedError:
            assert self.failed
        except EngineStoppedError:
            assert self.stopped
        except DoesNotFitError:
            assert len(prompt) + max_tokens - 1 > self.engine.allocator.max_fitting_tokens()
        else:
            assert not self.stopped and not self.failed
            self.requests += [(*each, prompt) for each in zip(requests, settings, strict=True)]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request, *_ = data.draw(st.sampled_from(self.requests))
        if not request.has_ended:
            self.cancelled.add(request.request_id)
        request.cancel()

    @rule(num_moves=st.integers(1, 12))
    def advance(self, num_moves):
        for _ in range(num_moves):
            if not self.failed:
                self.engine.advance()

    @precondition(lambda self: len(self.requests) > 6 and not self.failed)
    @rule()
    def fail(self):
        self.engine._runner.fail_at_step = self.engine._runner.num_steps + 1
        try:
            while self.engine.advance():
                pass
        except RuntimeError:
            self.failed = True
        self.engine._runner.fail_at_step = None

    @precondition(lambda self: len(self.requests) > 8)
    @rule(drain=st.booleans())
    def shut_down(self, drain):
        if not drain and not self.failed:
            self.cancelled.update(request.request_id for request, *_ in self.requests if not request.has_ended)
        self.engine.shutdown(drain=drain)
        self.stopped = True
        self._everything_has_ended()

    @invariant()
    def the_ledger_adds_up(self):
        assert list(violations(self.engine.allocator.state)) == []

    @invariant()
    def the_engine_counts_right(self):
        unended = [request for request, *_ in self.requests if not request.has_ended]
        stats = self.engine.stats
        assert stats.num_unended == len(unended)
        assert stats.num_queued == sum(request.started_ns is None for request in unended)
        assert stats.num_running <= self.engine.scheduler.config.max_num_seqs
        assert len(self.ended) + len(unended) == len(self.requests)

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.shutdown()
            self._everything_has_ended()
            found = run_live_again(LogReader(self.folder.name))
            assert found.is_equal and found.steps == self.engine.stats.num_steps, found.divergence
            self.folder.cleanup()

    def _everything_has_ended(self):
        state = self.engine.allocator.state
        assert self.engine.allocator.pool.num_held_blocks == 0 and not state.row_of
        assert not self.engine._driver._generations and not self.engine.scheduler.has_unfinished
        assert self.log.replay().snapshot() == state.snapshot()
        for request, each, prompt in self.requests:
            self._ended_right(request, prompt, each)

    def _ended_right(self, request, prompt, each):
        stats, tokens = request.stats, tuple(request._token_ids)
        assert request.has_ended and tokens == defined(prompt, each, len(tokens))
        assert stats.num_output_tokens == len(tokens) <= each.max_tokens
        assert STOP_TOKEN not in tokens[:-1]
        if tokens and tokens[-1] == STOP_TOKEN:
            assert stats.finish_reason == "stop"
        elif len(tokens) == each.max_tokens:
            assert stats.finish_reason == "length"
        elif stats.finish_reason == "abort":
            assert request.request_id in self.cancelled
        else:
            assert self.failed and stats.finish_reason == "error"
        if tokens:
            assert stats.queue_time_s + 1 <= stats.ttft_s <= stats.e2e_s


LiveHistories.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestLiveHistories = LiveHistories.TestCase


def test_a_request_that_preempts_itself_does_not_stop_those_behind_it():
    machine = LiveHistories()
    machine.start(windowed=False, policy="priority", num_blocks=12, max_num_seqs=2, enable_caching=True)
    machine.submit(several=[(0, 1, 1, 0.0, None, 0, 1), (0, 1, 1, 0.0, None, 0, 1), (0, 5, 24, 0.0, None, 0, 2)])
    while machine.engine.advance():
        pass
    assert machine.engine.scheduler.stats.num_preemptions > 0
    machine.teardown()
