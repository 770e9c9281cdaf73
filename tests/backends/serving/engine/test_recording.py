"""A live run's log: it verifies, and deciding it again gives the same commits, tables and slots."""

import json
import sys

import attrs
import numpy as np
import pytest

pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("pyarrow", reason="event logs need pyarrow")

from kvledger.backends import SimBackend
from kvledger.backends.serving import EngineFailedError, LiveRecording, SamplingSettings
from kvledger.backends.sinks import (
    DurableLog,
    FlushPolicy,
    LoggedNote,
    LogReader,
    LogWriteError,
    RequestArrived,
    RequestEnded,
    RunEnded,
    StepComputed,
)
from kvledger.core import InputError, TokenBatch
from kvledger.core.events import BlocksShared, RowsReleased, TokensPlaced
from kvledger.sim.logs.live_rerun import run_live_again
from kvledger.sim.logs.verification import verify_log

pytestmark = pytest.mark.torch


@pytest.fixture
def recorded(make_engine, tmp_path):
    """An engine that writes a log, and where."""

    def make(name="run.log", **settings):
        directory = tmp_path / name
        recording = lambda allocator, scheduler: LiveRecording.create(  # noqa: E731
            directory,
            flush=FlushPolicy(every_commits=1),
            allocator=allocator,
            scheduler=scheduler,
            facts={"model": "reader"},
        )
        return make_engine(recording=recording, **settings), directory

    return make


@pytest.fixture
def kvledger(monkeypatch, capsys):
    """Run the command line; return (exit code, standard output)."""
    from kvledger.sim.commands.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvledger", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def serve_some(engine, num_requests=40, seed=0):
    """Requests that share prefixes, stop early, are cancelled, and preempt each other."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, 60, 20).tolist()
    requests = []
    for place in range(num_requests):
        prompt = shared[: random.integers(1, 20)] + random.integers(0, 60, random.integers(1, 10)).tolist()
        settings = SamplingSettings(max_tokens=int(random.integers(1, 20)), stop_token_ids=[1, 2, 3], seed=place)
        samples = [attrs.evolve(settings, seed=100 * place + sample) for sample in range(1 + place % 4 // 2)]
        requests += engine.submit_samples(prompt, samples, cache_salt=[None, "a"][place % 2])
        for _ in range(random.integers(0, 6)):
            engine.advance()
        if place % 5 == 0:
            requests[random.integers(0, len(requests))].cancel()
    return requests


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_live_run_decided_again_gives_the_same_commits_tables_and_slots(recorded, windowed, policy) -> None:
    engine, directory = recorded(windowed=windowed, policy=policy, num_blocks=30 if windowed else 16, start=False)
    slots_of_steps = []

    def keep_slots(step):
        slots_of_steps.append(engine._backend.slots[:, : step.batch.num_tokens].tolist())

    engine._runner.on_step = keep_slots
    requests = serve_some(engine)
    engine.shutdown()
    stats = engine.stats.scheduler
    assert stats.num_preemptions and stats.num_aborted and stats.prefix_hits_tokens
    assert {request.finish_reason for request in requests} == {"stop", "length", "abort"}

    reader = LogReader(directory)
    assert verify_log(reader, checked_every=1).is_sound
    found = run_live_again(reader)
    assert found.is_equal and found.unended == 0
    assert found.steps == found.steps_with_slots == engine.stats.num_steps
    assert found.requests == len(requests)
    assert found.commits == engine.allocator.state.next_sequence

    # The log alone, followed by the simulated backend, has the device's slots at every step.
    simulated, steps = SimBackend(), iter(slots_of_steps)
    placed: dict[int, tuple[int, int]] = {}
    for record in reader.records():
        if isinstance(record, LoggedNote):
            if isinstance(record.note, StepComputed):
                batch = TokenBatch(*np.array([(row, *tokens) for row, tokens in placed.items()], dtype=np.int64).T)
                groups = range(len(simulated.block_tables))
                # In any order: where blocks are scarce, they are taken in the order of priorities, not of the batch.
                found_slots = [sorted(simulated.slot_mapping(batch, group).tolist()) for group in groups]
                assert found_slots == [sorted(slots) for slots in next(steps)]
                placed = {}
            continue
        simulated.apply(record.commit)
        is_fork = any(isinstance(event, BlocksShared) for event in record.commit.events)  # a fork computes nothing
        for event in record.commit.events:
            if isinstance(event, TokensPlaced) and not is_fork:
                columns = (np.asarray(column).tolist() for column in event)
                placed |= {row: (first, count) for row, first, count in zip(*columns, strict=True)}
            elif isinstance(event, RowsReleased):  # perhaps preempted after this step had served it
                for row in np.asarray(event.rows).tolist():
                    placed.pop(row, None)
    assert next(steps, None) is None


def test_the_notes_say_what_the_commits_do_not(recorded) -> None:
    engine, directory = recorded(start=False)
    first = engine.submit(list(range(9)), SamplingSettings(max_tokens=4, temperature=0), request_id="one")
    engine.submit([5], SamplingSettings(max_tokens=50, temperature=0), request_id="two", cache_salt="x")
    for _ in range(4):
        engine.advance()
    engine.cancel("two")
    engine.shutdown()
    notes = [logged.note for logged in LogReader(directory).notes()]
    arrived = [note for note in notes if isinstance(note, RequestArrived)]
    assert [(note.request_id, note.num_prompt_tokens, len(note.prompt_keys)) for note in arrived] == [
        ("one", 9, 2),
        ("two", 1, 0),
    ]
    assert arrived[0].facts == {"max_tokens": 4, "priority": 0}
    ended = {note.request_id: note for note in notes if isinstance(note, RequestEnded)}
    assert (ended["one"].reason, ended["one"].num_output_tokens, len(ended["one"].output_keys)) == ("length", 4, 1)
    assert (ended["two"].reason, ended["two"].num_output_tokens) == ("abort", 4)
    steps = [note for note in notes if isinstance(note, StepComputed)]
    assert [step.load.num_tokens for step in steps] == [10, 2, 2, 2]
    assert all(step.nanoseconds > 0 and step.slots_crc32 is not None for step in steps)
    assert notes[-1] == RunEnded({"num_requests": 2})
    assert LogReader(directory).manifest.header["facts"] == {"model": "reader"}
    assert first.result(0).finish_reason == "length"


def test_a_thread_of_its_own_and_many_readers_make_a_log_that_is_decided_again_alike(recorded) -> None:
    engine, directory = recorded(num_blocks=20)
    requests = [engine.submit([place % 7, 1, 2, 3, 4, 5], SamplingSettings(max_tokens=15)) for place in range(40)]
    for request in requests[::3]:
        request.cancel()
    engine.shutdown()
    found = run_live_again(LogReader(directory))
    assert found.is_equal and found.requests == 40 and found.steps == engine.stats.num_steps


def test_a_run_that_failed_is_decided_again_up_to_its_failure(recorded) -> None:
    engine, directory = recorded(start=False)
    engine._runner.fail_at_step = 6
    requests = [engine.submit([place, 1, 2, 3, 4, 5], SamplingSettings(max_tokens=15)) for place in range(4)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        while engine.advance():
            pass
    with pytest.raises(EngineFailedError):
        requests[0].result(0)
    engine.shutdown()
    reader = LogReader(directory)
    assert verify_log(reader).is_sound
    found = run_live_again(reader)
    assert found.is_equal and (found.steps, found.requests, found.unended) == (5, 4, 0)


def test_a_log_that_stops_in_the_middle_is_decided_again_as_far_as_it_goes(recorded) -> None:
    engine, directory = recorded(start=False)
    serve_some(engine, num_requests=10)
    engine._recording.log.flush()
    found = run_live_again(LogReader(directory))
    assert found.is_equal and 0 < found.steps == engine.stats.num_steps


def test_another_decision_is_found_and_named(recorded, tmp_path) -> None:
    """A log whose header tells of another scheduler than the one that ran cannot come out again."""
    engine, directory = recorded(start=False, num_blocks=16)
    serve_some(engine)
    engine.shutdown()
    reader = LogReader(directory)
    header = json.loads(json.dumps(reader.manifest.header))
    header["scheduler"]["max_num_seqs"] = 3
    with DurableLog.create(tmp_path / "other", flush=FlushPolicy(every_commits=1), header=header) as log:
        for record in reader.records():
            if isinstance(record, LoggedNote):
                log.note(record.note)
            else:
                log.apply(record.commit)
    found = run_live_again(LogReader(tmp_path / "other"))
    assert not found.is_equal and found.divergence is not None
    assert ", but the log " in found.divergence


def copied(reader, directory, change):
    with DurableLog.create(directory, flush=FlushPolicy(every_commits=1), header=reader.manifest.header) as log:
        for record in reader.records():
            if isinstance(record, LoggedNote):
                note = change(record.note)
                if note is not None:
                    log.note(note)
            else:
                log.apply(record.commit)
    return LogReader(directory)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (StepComputed, lambda note: attrs.evolve(note, slots_crc32=note.slots_crc32 ^ 1), "slots of step 0 differ"),
        (StepComputed, lambda note: attrs.evolve(note, load=note.load._replace(num_sampled=9)), "step 0 computes"),
        (StepComputed, lambda note: None, "step 0 is next, but the log continues with"),
        (RequestEnded, lambda note: attrs.evolve(note, num_output_tokens=99), "in the log it finishes with 99"),
        (RequestEnded, lambda note: None, "but not in the log|but the log continues with|but the log has"),
        (RequestArrived, lambda note: attrs.evolve(note, prompt_keys=()), "but the log has"),
    ],
)
def test_any_other_note_than_was_written_is_found(recorded, tmp_path, kind, change, message) -> None:
    engine, directory = recorded(start=False, num_blocks=16)
    serve_some(engine, num_requests=12)
    engine.shutdown()
    reader = copied(
        LogReader(directory), tmp_path / "changed", lambda note: change(note) if isinstance(note, kind) else note
    )
    found = run_live_again(reader)
    assert not found.is_equal
    assert any(part in found.divergence for part in message.split("|")), found.divergence


def test_a_recording_for_other_settings_than_the_engines_is_refused(make_engine, tmp_path) -> None:
    def other(allocator, scheduler):
        return LiveRecording.create(
            tmp_path / "run.log",
            flush=FlushPolicy(every_commits=1),
            allocator=allocator,
            scheduler=attrs.evolve(scheduler, max_num_seqs=2),
        )

    with pytest.raises(InputError, match="made for other settings"):
        make_engine(recording=other)


def test_a_disk_that_is_full_stops_the_engine_and_shutdown_says_what_is_missing(recorded, monkeypatch) -> None:
    from kvledger.backends.sinks.log.stream import StreamWriter

    engine, directory = recorded(start=False)
    request = engine.submit([1, 2, 3], SamplingSettings(max_tokens=9, temperature=0))
    for _ in range(4):
        engine.advance()

    def full(self, batch, fsync):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "append", full)
        with pytest.raises(LogWriteError, match="No space left on device"):
            while engine.advance():
                pass
        with pytest.raises(EngineFailedError, match="No space left"):
            request.result(0)
        assert engine.allocator.pool.num_held_blocks == 0
        with pytest.raises(LogWriteError):
            engine.shutdown()
    engine.shutdown()  # there is room again
    found = run_live_again(LogReader(directory))
    assert found.is_equal and found.steps >= 3


def test_a_log_of_another_kind_is_refused(tmp_path) -> None:
    with DurableLog.create(tmp_path / "bare", flush=FlushPolicy(every_commits=1)):
        pass
    with pytest.raises(InputError, match="is not the log of a live engine"):
        run_live_again(LogReader(tmp_path / "bare"))


def test_log_replay_of_a_live_run_says_that_everything_came_out_again(recorded, kvledger) -> None:
    engine, directory = recorded(start=False)
    serve_some(engine, num_requests=12)
    engine.shutdown()
    code, out = kvledger("log", "replay", directory)
    assert code == 0 and "commits, block tables and free queue are equal" in out
    code, out = kvledger("log", "replay", directory, "--json")
    document = json.loads(out)
    assert code == 0 and document["equal"] and document["steps"] == engine.stats.num_steps


def test_log_replay_of_a_live_run_under_other_options_is_a_simulation_of_its_requests(recorded, kvledger) -> None:
    engine, directory = recorded(start=False)
    requests = serve_some(engine, num_requests=12)
    engine.shutdown()
    options = ["--num-gpu-blocks-override", 50, "--block-size", 4, "--latency", "linear", "--json"]
    code, out = kvledger("log", "replay", directory, *options)
    document = json.loads(out)
    assert code == 0 and document["requests"]["finished"] == len(requests)
    assert document["trace"]["input_tokens"] == sum(request.stats.num_prompt_tokens for request in requests)
    assert document["trace"]["output_tokens"] == sum(request.stats.num_output_tokens for request in requests)
    assert document["prefix_cache"]["hits_tokens"] > 0


def test_log_replay_fails_where_the_log_is_not_what_is_decided(recorded, tmp_path, kvledger) -> None:
    engine, directory = recorded(start=False, num_blocks=16)
    serve_some(engine, num_requests=12)
    engine.shutdown()
    change = lambda note: attrs.evolve(note, slots_crc32=7) if isinstance(note, StepComputed) else note  # noqa: E731
    copied(LogReader(directory), tmp_path / "changed", change)
    code, out = kvledger("log", "replay", tmp_path / "changed")
    assert code == 1 and "NOT EQUAL: the slots of step 0" in out


def test_the_commands_for_logs_show_a_live_run(recorded, kvledger, tmp_path) -> None:
    engine, directory = recorded(start=False)
    requests = serve_some(engine, num_requests=6)
    engine.shutdown()
    for command in ("verify", "stats", "show"):
        code, out = kvledger("log", command, directory, "--json")
        assert code == 0 and json.loads(out)
        code, out = kvledger("log", command, directory)
        assert code == 0 and ("StepComputed" in out or command == "verify")
    code, _ = kvledger("log", "convert", directory, tmp_path / "trace.jsonl", "--to", "trace")
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert code == 0 and [(row["input_length"], row["output_length"]) for row in rows] == [
        (request.stats.num_prompt_tokens, request.stats.num_output_tokens) for request in requests
    ]
    code, _ = kvledger("log", "convert", directory, tmp_path / "events", "--to", "kv-events")
    assert code == 0 and (tmp_path / "events").stat().st_size > 0
