"""What vLLM's scheduler was seen to do becomes a log that verifies and whose decisions our engine makes again."""

import pytest

pytest.importorskip("pyarrow")

from kvledger.backends.serving.engine.recording import RECORDED_VLLM, live_header
from kvledger.backends.sinks.log.durable_log import Clock, DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.backends.sinks.log.rows import RequestEnded, StepComputed
from kvledger.backends.vllm.writer import EngineLog, EngineTime
from kvledger.core import InputError
from kvledger.core.events import BlocksFreed, FreeReason
from kvledger.sim.logs.engine_rerun import run_engine_again
from kvledger.sim.logs.verification import verify_log

from tests.backends.vllm.recorded_facts import keys_restored, recorded_facts
from tests.parity.scheduler_runs import scheduler_for

RECORDINGS = {recording["workload"]["kind"]: recording for recording in recorded_facts()}


def written(recording, directory, change=lambda facts: facts) -> LogReader:
    """Write the log of a recording, its facts changed by `change`."""
    settings = recording["workload"]["config"]
    scheduler = scheduler_for(settings)
    config, now = scheduler.allocator.config, EngineTime(0)
    header = live_header(
        config, scheduler.config, {"async_scheduling": settings.get("async_scheduling", False)}, RECORDED_VLLM
    )
    durable = DurableLog.create(
        directory, flush=FlushPolicy(every_commits=50), clock=Clock("unix", lambda: now.ns), header=header
    )
    log = EngineLog(durable, config, now)
    for message in recording["facts"]:
        log.apply(change(keys_restored(message)))
    log.close()
    return LogReader(directory)


@pytest.mark.parametrize("kind", RECORDINGS)
def test_a_recording_verifies_and_ends_with_the_free_queue_of_vllm(kind, tmp_path) -> None:
    reader = written(RECORDINGS[kind], tmp_path)
    assert verify_log(reader, checked_every=1).fault is None
    assert list(reader.state().pool.free_queue.order()) == RECORDINGS[kind]["free_queue"]


@pytest.mark.parametrize("kind", [kind for kind in RECORDINGS if kind != "ngram"])
def test_our_engine_decides_every_recorded_step_again(kind, tmp_path) -> None:
    recording = RECORDINGS[kind]
    found = run_engine_again(written(recording, tmp_path))
    assert found.divergence is None
    assert found.requests == len(recording["workload"]["requests"])
    assert found.steps > 50


def test_a_run_with_drafts_is_not_decided_again(tmp_path) -> None:
    with pytest.raises(InputError, match="drafts"):
        run_engine_again(written(RECORDINGS["ngram"], tmp_path))


def test_another_decision_of_the_engine_is_found_with_its_step(tmp_path) -> None:
    def swap(facts):
        if not seen:
            seen.append(1)
            for blocks in (facts[facts.index("t") + 4], facts[facts.index("c") + 6]):
                blocks[:2] = blocks[1::-1]
        return facts

    seen: list[int] = []
    reader = written(RECORDINGS["plain"], tmp_path, swap)
    assert run_engine_again(reader).divergence.startswith("step 0, block tables: in the log")


def test_a_block_that_is_given_back_twice_is_a_double_free(tmp_path) -> None:
    def twice(facts):
        if "f" in facts and not seen:
            seen.append(1)
            place = facts.index("f")
            facts[place + 3] = [*facts[place + 3], facts[place + 3][0]]
        return facts

    seen: list[int] = []
    found = verify_log(written(RECORDINGS["plain"], tmp_path, twice))
    assert "double free" in found.fault.description


def test_a_block_that_a_request_keeps_is_a_leak(tmp_path) -> None:
    def keep(facts):
        if "f" in facts and not seen:
            seen.append(1)
            facts[facts.index("f") + 3].pop()
        return facts

    seen: list[int] = []
    found = verify_log(written(RECORDINGS["plain"], tmp_path, keep))
    assert "a leak" in found.fault.description


def test_a_hit_on_a_block_that_was_overwritten_is_found(tmp_path) -> None:
    def stale(facts):
        if "a" in facts and not seen:
            seen.append(1)
            held = [facts[i + 4] for i, each in enumerate(facts) if each == "t"]
            facts[facts.index("a") + 4][0] = (held[-1] if isinstance(held[-1], int) else held[-1][-1]) if held else 1
        return facts

    seen: list[int] = []
    found = verify_log(written(RECORDINGS["plain"], tmp_path, stale))
    assert not found.is_sound


def test_preemptions_ends_and_step_times_are_noted(tmp_path) -> None:
    reader = written(RECORDINGS["priority"], tmp_path)
    freed = [event for commit in reader.commits() for event in commit.events if isinstance(event, BlocksFreed)]
    assert {event.reason for event in freed} == {FreeReason.FINISHED, FreeReason.PREEMPTED}
    notes = [logged.note for logged in reader.notes()]
    ends = {note.request_id: note.num_output_tokens for note in notes if isinstance(note, RequestEnded)}
    assert ends == {each["id"]: each["max_tokens"] for each in RECORDINGS["priority"]["workload"]["requests"]}
    steps = [note for note in notes if isinstance(note, StepComputed)]
    assert steps
    assert all(step.nanoseconds > 0 and step.load.num_tokens for step in steps)
