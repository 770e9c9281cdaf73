"""What a live engine promises to those who submit requests; its model knows earlier tokens only from the cache."""

import asyncio
import threading

import pytest

pytest.importorskip("torch", reason="live serving needs torch")

from kvledger.backends.serving import (
    QueueFullError,
    SamplingSettings,
)
from kvledger.backends.serving.model.served_model import LengthLimit
from kvledger.core import DoesNotFitError, InputError, SchedulerConfig

pytestmark = pytest.mark.torch

PROMPT = list(range(3, 12))


def greedy(max_tokens=8, **settings):
    return SamplingSettings(max_tokens=max_tokens, temperature=0, **settings)


def is_empty(engine):
    return engine.allocator.pool.num_held_blocks == 0 and not engine.allocator.state.row_of


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windowed", [False, True])
def test_every_request_of_a_batch_gets_the_tokens_that_it_gets_alone(make_engine, alone, windowed) -> None:
    engine = make_engine(windowed=windowed, num_blocks=60)
    prompts = [list(range(first, first + 3 + first % 17)) for first in range(30)]
    requests = [engine.submit(prompt, greedy(5 + place % 9)) for place, prompt in enumerate(prompts)]
    for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        result = request.result(20)
        assert result.token_ids == alone(prompt, 5 + place % 9)
        assert result.finish_reason == "length" and result.text is None
    assert is_empty(engine)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks(make_engine, alone) -> None:
    engine = make_engine(max_num_batched_tokens=8, start=False)
    request = engine.submit(list(range(30)), greedy(3))
    engine.shutdown()
    assert request.result(0).token_ids == alone(list(range(30)), 3)
    assert engine.stats.num_steps == 4 + 2


def test_tokens_come_one_by_one_and_the_last_says_why(make_engine, alone) -> None:
    deltas = list(make_engine().submit(PROMPT, greedy(5)))
    assert tuple(delta.token_id for delta in deltas) == alone(PROMPT, 5)
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    times = [delta.time_ns for delta in deltas]
    assert times == sorted(times)


def test_tokens_come_in_an_event_loop_too(make_engine, alone) -> None:
    engine = make_engine()

    async def read(prompt):
        return tuple([delta.token_id async for delta in engine.submit(prompt, greedy(6))])

    async def read_all():
        return await asyncio.gather(*[read(PROMPT[place:]) for place in range(5)])

    assert asyncio.run(read_all()) == [alone(PROMPT[place:], 6) for place in range(5)]


def test_a_reader_that_is_cancelled_in_its_event_loop_disturbs_nobody(make_engine, alone, eventually) -> None:
    engine = make_engine()
    may_go_on = threading.Event()
    engine._runner.on_step = lambda step: may_go_on.wait(20)
    request = engine.submit(PROMPT, greedy(4))

    async def give_up():
        async with asyncio.timeout(0.01):
            async for _ in request:
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    may_go_on.set()
    assert request.result(20).token_ids == alone(PROMPT, 4)
    assert tuple(delta.token_id for delta in request) == alone(PROMPT, 4)


def test_a_slow_reader_finds_every_token_after_the_end(make_engine, alone) -> None:
    engine = make_engine()
    request = engine.submit(PROMPT, greedy(10))
    request.result(20)
    engine.shutdown()
    assert tuple(delta.token_id for delta in request) == alone(PROMPT, 10)
    assert list(request) == []


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_is_its_last_token(make_engine, alone) -> None:
    whole = alone(PROMPT, 12)
    stop = whole[5]
    expected = whole[: whole.index(stop) + 1]
    result = make_engine().submit(PROMPT, greedy(12, stop_token_ids=[stop])).result(20)
    assert result.token_ids == expected
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_the_models_end_of_sequence_ends_the_output_unless_ignored(make_engine, alone) -> None:
    whole = alone(PROMPT, 12)
    engine = make_engine(eos_token_ids=[whole[4]])
    assert engine.submit(PROMPT, greedy(12)).result(20).token_ids == whole[: whole.index(whole[4]) + 1]
    ignoring = engine.submit(PROMPT, greedy(12, ignore_eos=True)).result(20)
    assert (ignoring.token_ids, ignoring.finish_reason) == (whole, "length")


@pytest.mark.parametrize("end", [-1, 61])
def test_an_end_of_sequence_that_is_no_token_of_the_model_changes_nothing(make_engine, end) -> None:
    """Configs name such ones; the last token, say, is not kept back for one of -1."""
    engine = make_engine(eos_token_ids=[end])
    settings = greedy(6, logit_bias={60: 100}, min_tokens=6)
    assert engine.submit(PROMPT, settings).result(20).token_ids == (60,) * 6


def test_a_stop_at_the_last_token_allowed_is_a_stop(make_engine, alone) -> None:
    whole = alone(PROMPT, 4)
    assert whole[3] not in whole[:3]
    result = make_engine().submit(PROMPT, greedy(4, stop_token_ids=[whole[3]])).result(20)
    assert (result.token_ids, result.finish_reason) == (whole, "stop")


def test_a_stop_text_ends_the_output_before_it(make_engine, alone, text) -> None:
    whole = text.decode(list(alone(PROMPT, 12)))
    stop = whole[4:7]
    engine = make_engine(tokenizer=text)
    request = engine.submit(PROMPT, greedy(12, stop=["##", stop]))
    assert "".join(delta.text for delta in request) == whole[: whole.index(stop)]
    result = request.result(0)
    assert (result.text, result.finish_reason, result.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    assert len(result.token_ids) == whole.index(stop) + 3
    assert is_empty(engine)


def test_text_held_back_for_a_stop_that_does_not_come_is_given_out_at_the_end(make_engine, alone, text) -> None:
    whole = text.decode(list(alone(PROMPT, 6)))
    request = make_engine(tokenizer=text).submit(PROMPT, greedy(6, stop=[whole[4:6] + "?!?!"]))
    deltas = list(request)
    assert deltas[-2].text == "" and "".join(delta.text for delta in deltas) == whole
    assert request.result(0).finish_reason == "length"


def test_a_request_of_one_token_ends_with_it(make_engine, alone) -> None:
    assert make_engine().submit([7], greedy(1)).result(20).token_ids == alone([7], 1)


# -- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 2.0, "top_k": 5}]
)
def test_seeded_draws_do_not_depend_on_neighbours_or_on_preemption(make_engine, drawn_alone, how) -> None:
    engine = make_engine(num_blocks=20, start=False)
    settings = [SamplingSettings(max_tokens=20, seed=seed, **how) for seed in range(8)]
    requests = [engine.submit(PROMPT[place:], each) for place, each in enumerate(settings)]
    engine.shutdown()
    for place, (request, each) in enumerate(zip(requests, settings, strict=True)):
        assert request.result(0).token_ids == drawn_alone(PROMPT[place:], each)
    assert engine.stats.scheduler.num_preemptions > 0
    assert max(request.stats.num_preemptions for request in requests) > 0


def test_requests_without_a_seed_draw_differently_and_alike_in_the_next_run(make_engine) -> None:
    runs = []
    for seed in (5, 5, 6):
        engine = make_engine(seed=seed)
        requests = [engine.submit(PROMPT, SamplingSettings(max_tokens=10)) for _ in range(3)]
        runs.append([request.result(20).token_ids for request in requests])
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) == 3


def test_log_probabilities_come_with_each_token(make_engine) -> None:
    deltas = list(make_engine().submit(PROMPT, greedy(3, logprobs=2)))
    for delta in deltas:
        assert delta.top_logprobs[0] == (delta.token_id, delta.logprob)
        assert delta.top_logprobs[1][1] <= delta.logprob < 0


# -- the cache -----------------------------------------------------------------------------------------------------


def test_a_next_turn_finds_the_blocks_of_prompt_and_output(make_engine, alone) -> None:
    engine = make_engine()
    first = engine.submit(PROMPT, greedy(11)).result(20)
    prompt = [*PROMPT, *first.token_ids, 1, 2]
    second = engine.submit(prompt, greedy(5)).result(20)
    # 9 + 11 tokens, of which the last was never computed: 19 are 4 blocks of 4.
    assert second.stats.num_cached_tokens == 16
    assert second.token_ids == alone(prompt, 5)


def test_tenants_do_not_share_blocks_and_a_tenant_does(make_engine, alone) -> None:
    engine = make_engine()
    cached = {}
    for salt in ("a", "b", None, "a", "b", None):
        result = engine.submit(PROMPT, greedy(3), cache_salt=salt).result(20)
        assert result.token_ids == alone(PROMPT, 3)
        cached.setdefault(salt, []).append(result.stats.num_cached_tokens)
    assert cached == {"a": [0, 8], "b": [0, 8], None: [0, 8]}


def test_without_prefix_caching_nothing_is_found(make_engine) -> None:
    engine = make_engine(enable_caching=False)
    assert [engine.submit(PROMPT, greedy(3)).result(20).stats.num_cached_tokens for _ in range(2)] == [0, 0]


# -- order and figures ---------------------------------------------------------------------------------------------


def test_the_lowest_priority_value_goes_first(make_engine) -> None:
    ended = []
    engine = make_engine(policy="priority", max_num_seqs=1, start=False, on_request_ended=ended.append)
    requests = [engine.submit(PROMPT, greedy(2), priority=priority) for priority in (3, 0, 2, 0, -1)]
    engine.shutdown()
    assert [requests.index(request) for request in ended] == [4, 1, 3, 2, 0]


def test_a_priority_that_would_be_ignored_is_refused(make_engine) -> None:
    with pytest.raises(InputError, match="priority 1 has no effect under the policy 'fcfs'"):
        make_engine().submit(PROMPT, greedy(1), priority=1)


def test_figures_are_measured_on_the_engines_clock(make_engine) -> None:
    now = [100]

    def clock_ns():
        return now[0]

    def step_takes_a_second(step):
        now[0] += 10**9

    engine = make_engine(start=False, clock_ns=clock_ns, max_num_batched_tokens=8)
    engine._runner.on_step = step_takes_a_second
    request = engine.submit(PROMPT, greedy(3))
    assert request.stats.queue_time_s is None and request.stats.num_cached_tokens is None
    now[0] += 2 * 10**9
    engine.shutdown()
    stats = request.stats
    assert (stats.queue_time_s, stats.ttft_s, stats.tpot_s, stats.e2e_s) == (2.0, 4.0, 1.0, 6.0)
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_preemptions) == (9, 3, 0)
    assert stats.finish_reason == "length"


def test_the_engine_counts_who_runs_and_who_waits(make_engine) -> None:
    engine = make_engine(max_num_seqs=2, start=False)
    for _ in range(5):
        engine.submit(PROMPT, greedy(3))
    engine.advance()
    engine.advance()
    stats = engine.stats
    assert (stats.num_running, stats.num_queued, stats.num_unended, stats.num_steps) == (2, 3, 5, 1)
    assert stats.kv_cache_usage == 4 / 39  # two blocks shared, one of each
    engine.shutdown()
    assert engine.stats.kv_cache_usage == 0 and engine.stats.scheduler.num_finished == 5


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_at_once_and_takes_again_when_there_is_room(make_engine) -> None:
    engine = make_engine(max_queued_requests=3, max_num_seqs=2, start=False)
    requests = [engine.submit(PROMPT, greedy(2)) for _ in range(3)]
    with pytest.raises(QueueFullError, match=r"3 requests wait .* max_queued_requests"):
        engine.submit(PROMPT, greedy(2))
    engine.advance()  # takes them in and schedules two
    engine.advance()
    requests += [engine.submit(PROMPT, greedy(2)) for _ in range(2)]
    with pytest.raises(QueueFullError):
        engine.submit(PROMPT, greedy(2))
    requests[2].cancel()
    while engine.advance():
        pass
    assert [request.finish_reason for request in requests] == ["length"] * 2 + ["abort"] + ["length"] * 2
    engine.submit(PROMPT, greedy(2))


@pytest.mark.parametrize(
    ("prompt", "settings", "more", "error", "message"),
    [
        ([], greedy(1), {}, InputError, "the prompt has no tokens"),
        ([1, 61], greedy(1), {}, InputError, "prompt token 1 is 61; the model's vocabulary is 0 to 60"),
        ([-1], greedy(1), {}, InputError, "prompt token 0 is -1"),
        (["a"], greedy(1), {}, InputError, "whole numbers"),
        ([1.5], greedy(1), {}, InputError, "whole numbers"),
        (PROMPT, greedy(57), {}, DoesNotFitError, "65 tokens is longer than max_model_len 64"),
        (PROMPT, greedy(1, stop="x"), {}, InputError, "no tokenizer; use stop_token_ids"),
        (PROMPT, greedy(1), {"cache_salt": ""}, InputError, "cache_salt is ''"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_value(make_engine, prompt, settings, more, error, message):
    engine = make_engine()
    with pytest.raises(error, match=message):
        engine.submit(prompt, settings, **more)
    assert engine.stats.num_unended == 0
    assert engine.stats.scheduler.num_rejected == (error is DoesNotFitError)


def test_a_request_that_no_pool_holds_is_refused_with_the_longest_that_fits(make_engine) -> None:
    with pytest.raises(DoesNotFitError, match="the longest request that fits has 36 tokens"):
        make_engine(num_blocks=10).submit(PROMPT, greedy(30))


def test_an_id_can_be_used_again_only_after_its_end(make_engine) -> None:
    engine = make_engine(start=False)
    first = engine.submit(PROMPT, greedy(1), request_id="mine")
    with pytest.raises(InputError, match="a request 'mine' is still being served"):
        engine.submit(PROMPT, greedy(1), request_id="mine")
    while engine.advance():
        pass
    assert first.has_ended and engine.submit(PROMPT, greedy(1), request_id="mine").request_id == "mine"


def test_settings_that_a_live_engine_cannot_serve_with_are_refused(make_engine) -> None:
    from kvledger.backends.serving.engine.live_engine import _check_settings

    engine = make_engine()
    config, runner = engine.allocator.config, engine._runner
    with pytest.raises(InputError, match="num_speculative_tokens is 2, and a live engine has no draft model"):
        _check_settings(runner, config, SchedulerConfig(max_num_seqs=8, num_speculative_tokens=2))
    with pytest.raises(InputError, match="preemption_mode is 'swap'"):
        _check_settings(runner, config, SchedulerConfig(preemption_mode="swap", swap_space_blocks=4))
    runner.length_limit = LengthLimit(63, "the model was made for at most 63")
    with pytest.raises(InputError, match="max_model_len is 64, and the model was made for at most 63"):
        _check_settings(runner, config, SchedulerConfig())
