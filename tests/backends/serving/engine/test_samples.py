"""Several outputs of one prompt (the API's `n`): each is what it is alone, and the prompt is computed and held once."""

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("pyarrow", reason="event logs need pyarrow")

from kvledger.backends.serving import (  # noqa: E402
    EngineFailedError,
    LiveRecording,
    QueueFullError,
    SamplingSettings,
)
from kvledger.backends.serving.engine import generation as generation_module  # noqa: E402
from kvledger.backends.serving.engine.request_checks import RequestChecks  # noqa: E402
from kvledger.backends.serving.sampling.sampling import choose_tokens  # noqa: E402
from kvledger.backends.serving.sampling.settings import TokenRules  # noqa: E402
from kvledger.backends.sinks import FlushPolicy, LogReader, RequestArrived, RequestEnded  # noqa: E402
from kvledger.core import EventLog, InputError  # noqa: E402
from kvledger.core.events import BlockCopied, BlocksShared  # noqa: E402
from kvledger.core.keys.block_hash import block_hasher  # noqa: E402
from kvledger.sim.logs.live_rerun import run_live_again  # noqa: E402
from kvledger.sim.logs.verification import verify_log  # noqa: E402
from kvledger.sim.traces.logged import LiveTrace  # noqa: E402

from tests.backends.serving.cache_reader import Context  # noqa: E402
from tests.backends.serving.plain_sampling import outputs_alone  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = list(range(3, 13))
SHA256 = block_hasher()
DRAWN = SamplingSettings(max_tokens=12, temperature=1.3, presence_penalty=0.5, repetition_penalty=1.2, seed=0)


def drawn(count, **changes):
    return [attrs.evolve(DRAWN, seed=seed, **changes) for seed in range(count)]


def alone(prompt, settings):
    return tuple(outputs_alone(Context().forward, settings, prompt)[0])


def assert_are_alone(prompt, lives, settings):
    for live, each in zip(lives, settings, strict=True):
        assert live.result(20).token_ids == alone(prompt, each), each


def run(engine):
    while engine.advance():
        pass
    assert engine.allocator.pool.num_held_blocks == 0 and not engine._driver._generations


def events(log, kind):
    return [event for commit in log for event in commit.events if isinstance(event, kind)]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("enable_caching", [False, True])
def test_samples_share_the_prompt_and_part_where_they_differ(make_engine, windowed, enable_caching) -> None:
    log = EventLog()
    engine = make_engine(start=False, windowed=windowed, enable_caching=enable_caching, sinks=[log])
    settings = drawn(4)
    lives = engine.submit_samples(PROMPT, settings)
    run(engine)
    assert_are_alone(PROMPT, lives, settings)
    assert len({live.result(0).token_ids for live in lives}) == 4
    # The prompt once, and of each output all tokens but the last.
    assert engine.stats.scheduler.computed_tokens == 10 + 4 * 11
    groups = 2 if windowed else 1
    assert len(events(log, BlocksShared)) == 3 * groups
    assert len(events(log, BlockCopied)) == 3 * groups  # the third block of the prompt is full by half
    assert [live.stats.num_cached_tokens for live in lives] == [0, 10, 10, 10]
    assert len({live.first_token_ns for live in lives}) == 1


def test_a_prompt_that_ends_with_a_block_needs_no_copy(make_engine) -> None:
    log = EventLog()
    engine = make_engine(start=False, sinks=[log])
    lives = engine.submit_samples(PROMPT[:8], drawn(3))
    run(engine)
    assert_are_alone(PROMPT[:8], lives, drawn(3))
    assert events(log, BlocksShared) and not events(log, BlockCopied)


def test_samples_may_have_settings_of_their_own(make_engine) -> None:
    engine = make_engine()
    settings = [
        SamplingSettings(max_tokens=3, temperature=0),
        SamplingSettings(max_tokens=20, temperature=0, frequency_penalty=2),
        SamplingSettings(max_tokens=1, seed=5),
        SamplingSettings(max_tokens=9, seed=5, logit_bias={4: 3}, min_p=0.1),
    ]
    lives = engine.submit_samples(PROMPT, settings)
    assert_are_alone(PROMPT, lives, settings)
    assert [len(live.result(0).token_ids) for live in lives] == [3, 20, 1, 9]


@pytest.mark.parametrize("ends", [[1, 1, 1], [1, 9, 1], [9, 1, 1], [1, 9, 9]])
def test_a_first_token_may_be_the_last_one_of_any_of_them(make_engine, ends) -> None:
    engine = make_engine(start=False)
    settings = [attrs.evolve(each, max_tokens=end) for each, end in zip(drawn(3), ends, strict=True)]
    lives = engine.submit_samples(PROMPT, settings)
    run(engine)
    assert_are_alone(PROMPT, lives, settings)
    stats = engine.stats.scheduler
    assert (stats.num_submitted, stats.num_finished) == (3, 3)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("max_num_seqs", [2, 6])
def test_more_samples_than_there_is_room_for_take_turns(make_engine, windowed, max_num_seqs) -> None:
    engine = make_engine(num_blocks=24 if windowed else 13, windowed=windowed, max_num_seqs=max_num_seqs, start=False)
    families = [([*PROMPT[place:], place], drawn(5, max_tokens=15)) for place in range(4)]
    lives = [engine.submit_samples(prompt, settings) for prompt, settings in families]
    run(engine)
    for family, (prompt, settings) in zip(lives, families, strict=True):
        assert_are_alone(prompt, family, settings)
    if max_num_seqs == 6 and not windowed:
        assert engine.stats.scheduler.num_preemptions > 0


def test_samples_are_chosen_no_more_at_once_than_a_step_has_requests(make_engine, monkeypatch) -> None:
    """A step's sampler is measured with that many rows before the pool is sized."""
    num_rows = []

    def counted(logits, wanted):
        num_rows.append((len(logits), len(wanted)))
        return choose_tokens(logits, wanted)

    monkeypatch.setattr(generation_module, "choose_tokens", counted)
    engine = make_engine(max_num_seqs=3, start=False)
    settings = [drawn(7, max_tokens=2, logprobs=2), drawn(1, max_tokens=2), drawn(2, max_tokens=2)]
    families = [engine.submit_samples([*PROMPT[:6], place], each) for place, each in enumerate(settings)]
    run(engine)
    for place, (family, each) in enumerate(zip(families, settings, strict=True)):
        assert_are_alone([*PROMPT[:6], place], family, each)
    assert num_rows[:4] == [(3, 3), (3, 3), (3, 3), (1, 1)]
    assert all(count <= 3 for counts in num_rows for count in counts)


@pytest.mark.parametrize("cancelled", [[0], [1], [0, 1], [0, 1, 2], [2, 0]])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_sample_that_is_cancelled_at_any_time_takes_none_with_it(make_engine, cancelled, after) -> None:
    engine = make_engine(max_num_batched_tokens=8, start=False)  # the prompt takes two steps
    settings = drawn(3)
    lives = engine.submit_samples(PROMPT, settings)
    for _ in range(after):
        engine.advance()
    for place in cancelled:
        lives[place].cancel()
    run(engine)
    for place, (live, each) in enumerate(zip(lives, settings, strict=True)):
        result, expected = live.result(0), alone(PROMPT, each)
        if place in cancelled:
            assert result.finish_reason == "abort" and result.token_ids == expected[: len(result.token_ids)]
        else:
            assert result.token_ids == expected
    stats = engine.stats.scheduler
    assert (stats.num_aborted, stats.num_finished) == (len(cancelled), 3 - len(cancelled))


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_failure_ends_all_of_them(make_engine, step) -> None:
    engine = make_engine(max_num_batched_tokens=8, start=False)
    engine._runner.fail_at_step = step
    lives = [*engine.submit_samples(PROMPT, drawn(3)), engine.submit([1, 2], DRAWN)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(engine)
    for live in lives:
        with pytest.raises(EngineFailedError):
            live.result(0)
    assert engine.allocator.pool.num_held_blocks == 0 and engine.stats.num_queued == engine.stats.num_unended == 0


def test_what_settings_say_of_tokens_is_looked_at_once_for_all_samples(make_engine, monkeypatch) -> None:
    checked, made, make = [], [], TokenRules.of
    monkeypatch.setattr(RequestChecks, "_check_settings", lambda _self, each: checked.append(each))
    monkeypatch.setattr(TokenRules, "of", lambda each, ends: made.append(each) or make(each, ends))
    shared = attrs.evolve(DRAWN, stop_token_ids=[5, 6], logit_bias={1: 2.0}, min_tokens=2)
    settings = [*[shared.with_seed(seed) for seed in range(4)], attrs.evolve(shared, ignore_eos=True)]
    engine = make_engine(start=False)
    lives = engine.submit_samples(PROMPT, settings)
    assert checked == made == [settings[0], settings[4]]
    run(engine)
    assert_are_alone(PROMPT, lives, settings)


def test_the_prompt_is_hashed_once_for_all_samples(make_engine) -> None:
    hashed = []

    class Counting:
        name, root = SHA256.name, SHA256.root

        def chain(self, token_ids, block_size, parent=None, extra_keys=None):
            hashed.append(len(token_ids))
            return SHA256.chain(token_ids, block_size, parent, extra_keys)

    engine = make_engine(start=False, hasher=Counting())
    settings = drawn(4, max_tokens=12)
    lives = engine.submit_samples(PROMPT, settings, cache_salt="a secret")
    run(engine)
    assert_are_alone(PROMPT, lives, settings)
    # Whole blocks of 4: of 10 prompt tokens 8 once, and of 22 tokens in all the 12 behind those for each.
    assert sum(hashed) == 8 + 4 * 12


def test_all_are_queued_or_none(make_engine) -> None:
    engine = make_engine(max_queued_requests=4, start=False)
    engine.submit(PROMPT, DRAWN)
    with pytest.raises(QueueFullError, match=r"1 requests wait .* with 4 more"):
        engine.submit_samples(PROMPT, drawn(4))
    with pytest.raises(InputError, match="5 outputs of one prompt are more than the 4 requests that may wait at once"):
        engine.submit_samples(PROMPT, drawn(5))
    assert engine.stats.num_queued == 1
    assert len(engine.submit_samples(PROMPT, drawn(3))) == 3 and engine.stats.num_queued == 4
    engine.advance()
    engine.advance()
    assert engine.stats.num_queued == 0


@pytest.mark.parametrize(
    ("settings", "names", "message"),
    [
        ([], None, "no settings"),
        (drawn(2), ["a"], "1 request_ids for 2 outputs"),
        (drawn(2), ["a", "a"], "a request 'a' is still being served"),
        ([DRAWN, attrs.evolve(DRAWN, stop_token_ids=[61])], None, "stop_token_ids holds token 61"),
    ],
)
def test_samples_that_cannot_be_served_are_refused(make_engine, settings, names, message) -> None:
    engine = make_engine(start=False)
    with pytest.raises(InputError, match=message):
        engine.submit_samples(PROMPT, settings, request_ids=names)
    assert engine.stats.num_unended == 0


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(make_engine, tmp_path):
    """An engine without a thread that writes a log, and where."""

    def make(**settings):
        return make_engine(recording=record, start=False, **settings), tmp_path / "run.log"

    def record(allocator, scheduler):
        flush = FlushPolicy(every_commits=1)
        return LiveRecording.create(tmp_path / "run.log", flush=flush, allocator=allocator, scheduler=scheduler)

    return make


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_run_with_samples_is_decided_again_alike(recorded, windowed, policy) -> None:
    engine, directory = recorded(windowed=windowed, policy=policy, num_blocks=30 if windowed else 16, max_num_seqs=5)
    random = np.random.default_rng(1)
    lives = []
    for place in range(25):
        settings = [
            attrs.evolve(DRAWN, seed=place * 10 + sample, max_tokens=int(random.integers(1, 15)), stop_token_ids=[1, 2])
            for sample in range(random.integers(1, 5))
        ]
        prompt = PROMPT[: random.integers(1, 10)] + random.integers(3, 60, random.integers(1, 9)).tolist()
        lives += engine.submit_samples(prompt, settings)
        for _ in range(random.integers(0, 6)):
            engine.advance()
        if place % 4 == 0:
            lives[int(random.integers(max(len(lives) - 6, 0), len(lives)))].cancel()
    engine.shutdown()
    reader = LogReader(directory)
    assert verify_log(reader).is_sound
    found = run_live_again(reader)
    assert found.is_equal and found.unended == 0, found.divergence
    assert (found.steps, found.requests) == (engine.stats.num_steps, len(lives))
    trace = list(LiveTrace(reader))
    assert len(trace) == len(lives)
    assert [row.arrival_s for row in trace] == sorted(row.arrival_s for row in trace)
    assert sum(row.output_length for row in trace) == sum(live.stats.num_output_tokens for live in lives)


def test_the_log_says_whose_sample_a_request_is(recorded) -> None:
    engine, directory = recorded()
    engine.submit_samples(PROMPT, [*drawn(2), attrs.evolve(DRAWN, max_tokens=1)], request_ids=["a", "b", "c"])
    engine.shutdown()
    notes = [logged.note for logged in LogReader(directory).notes()]
    arrived = {note.request_id: note for note in notes if isinstance(note, RequestArrived)}
    assert arrived["a"].facts == {"max_tokens": 12, "priority": 0}
    assert arrived["b"].facts == {"max_tokens": 12, "priority": 0, "sample_of": "a", "has_ended": False}
    assert arrived["c"].facts == {"max_tokens": 1, "priority": 0, "sample_of": "a", "has_ended": True}
    assert len({note.prompt_keys for note in arrived.values()}) == 1 and len(arrived["a"].prompt_keys) == 2
    ended = {note.request_id: note.num_output_tokens for note in notes if isinstance(note, RequestEnded)}
    assert ended == {"a": 12, "b": 12, "c": 1}


def test_a_failed_run_with_samples_is_decided_again_up_to_its_failure(recorded) -> None:
    engine, directory = recorded(max_num_batched_tokens=8)
    engine._runner.fail_at_step = 3
    engine.submit_samples([1, 2], drawn(2))
    engine.submit_samples(list(range(20)), drawn(3))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(engine)
    engine.shutdown()
    found = run_live_again(LogReader(directory))
    assert found.is_equal and (found.steps, found.requests, found.unended) == (2, 5, 0), found.divergence
