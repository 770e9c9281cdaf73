"""How requests and engines end: cancelled, drained, aborted, or failed; nothing stays held and nobody waits."""

import threading

import numpy as np
import pytest

pytest.importorskip("torch", reason="live serving needs torch")

from kvledger.backends.serving import (
    EngineFailedError,
    EngineStoppedError,
    SamplingSettings,
)
from kvledger.core import MisuseError

pytestmark = pytest.mark.torch

PROMPT = list(range(3, 12))


def greedy(max_tokens=8, **settings):
    return SamplingSettings(max_tokens=max_tokens, temperature=0, **settings)


def is_empty(engine):
    return engine.allocator.pool.num_held_blocks == 0 and not engine.allocator.state.row_of


# -- cancelling ----------------------------------------------------------------------------------------------------


def cancelled_at(engine, request, num_moves):
    for _ in range(num_moves):
        engine.advance()
    request.cancel()
    while engine.advance():
        pass
    return request.result(0)


@pytest.mark.parametrize(
    ("num_moves", "num_outputs"),
    [
        pytest.param(0, 0, id="before it is taken in"),
        pytest.param(1, 0, id="before its first step"),
        pytest.param(2, 0, id="in the middle of its prompt"),
        # The next step is decided when one ends, and computed all the same.
        pytest.param(5, 2, id="after its first token"),
        pytest.param(8, 5, id="in the middle of its output"),
    ],
)
def test_a_cancelled_request_keeps_its_tokens_and_frees_its_blocks(make_engine, alone, num_moves, num_outputs):
    engine = make_engine(max_num_batched_tokens=8, start=False)
    prompt = list(range(30))
    request = engine.submit(prompt, greedy(10))
    result = cancelled_at(engine, request, num_moves)
    assert (result.token_ids, result.finish_reason) == (alone(prompt, num_outputs), "abort")
    assert tuple(delta.token_id for delta in request) == result.token_ids
    assert is_empty(engine) and engine.stats.num_queued == engine.stats.num_unended == 0
    assert engine.stats.scheduler.num_aborted == 1
    request.cancel()
    engine.cancel("nobody")
    assert not engine.advance()


def test_cancelling_after_the_end_changes_nothing(make_engine) -> None:
    engine = make_engine()
    request = engine.submit(PROMPT, greedy(2))
    result = request.result(20)
    request.cancel()
    assert request.result(0) == result and result.finish_reason == "length"


def test_a_cancelled_neighbour_changes_nothing_for_the_others(make_engine, alone) -> None:
    engine = make_engine(start=False)
    requests = [engine.submit(PROMPT, greedy(12)) for _ in range(6)]
    for place in (4, 1, 5):
        engine.advance()
        engine.advance()
        requests[place].cancel()
    engine.shutdown()
    for place in (0, 2, 3):
        assert requests[place].result(0).token_ids == alone(PROMPT, 12)


def test_a_request_that_waits_for_its_blocks_again_can_be_cancelled(make_engine) -> None:
    engine = make_engine(num_blocks=12, start=False)
    requests = [engine.submit(PROMPT[place:], greedy(25)) for place in range(3)]
    while not any(request.stats.num_preemptions for request in requests):
        assert engine.advance()
    (preempted,) = [request for request in requests if request.stats.num_preemptions]
    assert cancelled_at(engine, preempted, 0).finish_reason == "abort"
    assert is_empty(engine)


def test_leaving_a_request_early_cancels_it(make_engine, eventually) -> None:
    engine = make_engine()
    with engine.submit(PROMPT, greedy(50)) as request:
        next(iter(request))
    assert request.result(20).finish_reason in ("abort", "length")
    eventually(lambda: is_empty(engine))


# -- the end of the engine -----------------------------------------------------------------------------------------


def test_a_drained_engine_finishes_what_it_has_and_takes_no_more(make_engine, alone) -> None:
    engine = make_engine()
    requests = [engine.submit(PROMPT, greedy(9)) for _ in range(12)]
    engine.shutdown(drain=True, timeout_s=20)
    assert all(request.result(0).token_ids == alone(PROMPT, 9) for request in requests)
    with pytest.raises(EngineStoppedError, match="shut down"):
        engine.submit(PROMPT, greedy(1))
    assert is_empty(engine) and not engine._thread.is_alive()
    engine.shutdown()


def test_a_shutdown_without_drain_aborts_after_the_step_in_flight(make_engine, alone) -> None:
    engine = make_engine()
    requests = [engine.submit(PROMPT, greedy(50)) for _ in range(20)]
    next(iter(requests[0]))
    engine.shutdown(drain=False, timeout_s=20)
    for request in requests:
        result = request.result(0)
        assert result.token_ids == alone(PROMPT, len(result.token_ids))
        assert result.finish_reason == ("length" if len(result.token_ids) == 50 else "abort")
    assert is_empty(engine) and not engine._thread.is_alive()


def test_a_drain_that_takes_too_long_aborts_the_rest(make_engine) -> None:
    engine = make_engine()
    slow = threading.Event()
    engine._runner.on_step = lambda step: slow.wait(0.02)
    request = engine.submit(PROMPT, greedy(50))
    engine.shutdown(drain=True, timeout_s=0.1)
    assert request.result(0).finish_reason == "abort" and is_empty(engine)


def test_a_step_that_hangs_is_reported_and_can_be_waited_for_again(make_engine) -> None:
    engine = make_engine()
    may_go_on, is_there = threading.Event(), threading.Event()
    engine._runner.on_step = lambda step: (is_there.set(), may_go_on.wait(20))
    engine.submit(PROMPT, greedy(5))
    assert is_there.wait(20)
    with pytest.raises(TimeoutError, match=r"has not ended within 0.05 s; call shutdown again"):
        engine.shutdown(drain=False, timeout_s=0.05)
    may_go_on.set()
    engine.shutdown(drain=False, timeout_s=20)
    assert is_empty(engine)


def test_an_engine_left_by_an_error_does_not_drain(make_engine) -> None:
    engine = make_engine()
    with pytest.raises(KeyError), engine:
        request = engine.submit(PROMPT, greedy(50))
        raise KeyError("elsewhere")
    assert request.has_ended and is_empty(engine)


def test_a_callback_cannot_shut_its_own_engine_down(make_engine) -> None:
    met = []

    def shut_down(request):
        try:
            engine.shutdown()
        except MisuseError as error:
            met.append(str(error))

    engine = make_engine(on_request_ended=shut_down)
    engine.submit(PROMPT, greedy(1)).result(20)
    engine.shutdown()
    assert len(met) == 1 and "its own thread" in met[0]


def test_a_driven_engine_is_not_driven_by_hand(make_engine) -> None:
    with pytest.raises(MisuseError, match="a thread drives this engine"):
        make_engine().advance()


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_runner_that_fails_ends_every_request_with_the_error_and_frees_everything(make_engine, alone) -> None:
    engine = make_engine(max_num_seqs=2)
    engine._runner.fail_at_step = 4
    waiting = threading.Event()
    engine._runner.on_step = lambda step: waiting.wait(20)
    requests = [engine.submit(PROMPT, greedy(20)) for _ in range(5)]
    waiting.set()
    for request in requests:
        with pytest.raises(EngineFailedError, match="RuntimeError: the device is gone") as caught:
            request.result(20)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert request.stats.finish_reason == "error"
    with pytest.raises(EngineFailedError):
        engine.submit(PROMPT, greedy(1))
    read = []
    with pytest.raises(EngineFailedError):
        read.extend(delta.token_id for delta in requests[0])
    assert isinstance(engine.failure, RuntimeError)
    engine.shutdown(timeout_s=20)
    assert is_empty(engine) and not engine._thread.is_alive()


def test_tokens_from_before_a_failure_can_still_be_read(make_engine, alone) -> None:
    engine = make_engine()
    engine._runner.fail_at_step = 4
    read = []
    with pytest.raises(EngineFailedError):
        read.extend(delta.token_id for delta in engine.submit(PROMPT, greedy(20)))
    assert tuple(read) == alone(PROMPT, 3)


def test_a_sink_that_fails_stops_the_engine_and_nobody_waits_for_ever(make_engine) -> None:
    class FullDisk:
        def apply(self, commit):
            if commit.sequence >= 6:
                raise OSError(28, "No space left on device")

    engine = make_engine(sinks=[FullDisk()])
    requests = [engine.submit(PROMPT, greedy(20)) for _ in range(3)]
    for request in requests:
        with pytest.raises(EngineFailedError, match="No space left"):
            request.result(20)
    assert any("No space left" in note for note in engine.failure.__notes__)
    engine.shutdown(timeout_s=20)
    assert is_empty(engine)


def test_a_listener_that_fails_stops_the_engine_and_nobody_waits_for_ever(make_engine) -> None:
    def listen(request):
        raise ZeroDivisionError("in the metrics")

    engine = make_engine(on_request_ended=listen)
    requests = [engine.submit(PROMPT, greedy(3 + place)) for place in range(3)]
    assert requests[0].result(20).finish_reason == "length"
    for request in requests[1:]:
        with pytest.raises(EngineFailedError, match="in the metrics"):
            request.result(20)
    engine.shutdown(timeout_s=20)
    assert is_empty(engine)


def test_waiting_for_a_result_that_does_not_come_says_how_far_it_is(make_engine) -> None:
    engine = make_engine(start=False)
    request = engine.submit(PROMPT, greedy(7))
    with pytest.raises(TimeoutError, match=r"0 of at most 7 output tokens after 0\.01 s"):
        request.result(0.01)


def test_the_engine_keeps_nothing_of_requests_that_have_ended(make_engine) -> None:
    import gc
    import weakref

    for policy in ("fcfs", "priority"):
        engine = make_engine(policy=policy, start=False)
        ended = weakref.WeakSet()
        for _ in range(30):
            ended.add(engine.submit(np.array(PROMPT), greedy(2)))
        while engine.advance():
            pass
        gc.collect()
        # A row of the block table names the request that held it last until it is used again.
        assert len(ended) <= engine.allocator.config.max_num_reqs


def test_a_queue_by_priority_keeps_no_order_of_requests_that_have_ended(make_engine) -> None:
    engine = make_engine(policy="priority", start=False)
    for _ in range(50):
        engine.submit(PROMPT, greedy(2))
    while engine.advance():
        pass
    assert len(engine.scheduler.waiting._order_of) <= engine.allocator.config.max_num_reqs
