"""The durable log: what it costs the allocator, bytes an event, and how fast a million events are written and verified.

    python -m pytest bench/test_durable_log.py --benchmark-enable --benchmark-columns=min,median -s

Each round drives a new allocator through the same requests: a prompt of 8 blocks of which half are found, two decode
steps of a whole batch, an end. `extra_info` (--benchmark-json) holds cpu_us_per_event (of all threads, so that other
work on the machine counts little), and cpu_us_per_event_above_no_log against rounds without a log that are timed in
between. The million-event log is made once; its verification runs in
processes of their own, whose peak memory is compared with that for a tenth of the log.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request
from kvledger.core.types import EventSink

BLOCK_SIZE, BATCH = 16, 32
NUM_BLOCKS = 8192
MILLION = 1_000_000
POLICIES = {
    "no log": None,
    "every 50 ms": FlushPolicy(every_ms=50),
    "every 100 commits": FlushPolicy(every_commits=100),
    "every commit": FlushPolicy(every_commits=1),
}


class Keys:
    """32-byte keys like SHA-256's: four blocks of one of 64 prefixes, then blocks of the request's own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def keys(self, start: int, stop: int) -> list[bytes]:
        own, shared = self.number.to_bytes(24, "big"), (self.number % 64).to_bytes(24, "little")
        return [(shared if i < 4 else own) + i.to_bytes(8, "big") for i in range(start, stop)]


class CountEvents:
    def __init__(self) -> None:
        self.events = 0

    def apply(self, commit) -> None:
        self.events += len(commit.events)


def drive(sinks: Iterable[EventSink], num_events: int) -> int:
    """Requests in batches until there are so many events. Returns how many there are."""
    count = CountEvents()
    config = AllocatorConfig(
        num_blocks=NUM_BLOCKS, groups=[FullAttention(BLOCK_SIZE)], max_model_len=512, max_num_reqs=BATCH
    )
    allocator = KVCacheAllocator(config, [count, *sinks])
    number = 0
    while count.events < num_events:
        batch = [Request(str(number + i), 8 * BLOCK_SIZE - 1, 4, Keys(number + i)) for i in range(BATCH)]
        number += BATCH
        for request in batch:
            match = allocator.match_prefix(request)
            allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match)
        rows = np.array([allocator.row_of(request.request_id) for request in batch])
        for _ in range(2):
            allocator.append(rows)
        for request in batch:
            allocator.free(request.request_id)
    return count.events


def seconds_to_drive(policy: FlushPolicy | None, directory: Path, num_events: int) -> tuple[float, int, int]:
    """CPU seconds until everything is flushed (closing the last segment is not counted), events, bytes while open."""
    log = None if policy is None else DurableLog.create(directory, flush=policy)
    started = time.process_time()
    events = drive([] if log is None else [log], num_events)
    if log is not None:
        log.flush()
    seconds = time.process_time() - started
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.arrows"))
    if log is not None:
        log.close()
    return seconds, events, num_bytes


@pytest.mark.parametrize("name", POLICIES)
def test_overhead_on_the_allocator(benchmark, tmp_path: Path, name: str) -> None:
    without, with_log, numbers = [], [], iter(range(1000))

    def one_round() -> None:
        without.append(seconds_to_drive(None, tmp_path, 20_000)[0])
        with_log.append(seconds_to_drive(POLICIES[name], tmp_path / str(next(numbers)), 20_000))

    benchmark.pedantic(one_round, rounds=5, warmup_rounds=1)
    _, events, num_bytes = with_log[0]
    per_event = statistics.median(seconds for seconds, *_ in with_log) / events * 1e6
    benchmark.extra_info["bytes_per_event_while_open"] = num_bytes / events
    benchmark.extra_info["cpu_us_per_event"] = per_event
    benchmark.extra_info["cpu_us_per_event_above_no_log"] = per_event - statistics.median(without) / events * 1e6
    print(f"\n{name}: {benchmark.extra_info}")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, tuple[Path, dict]]:
    """Logs of a million events and of a tenth, by their number of events."""
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("made for --benchmark-enable only: it takes a minute")
    made = {}
    for num_events in (MILLION // 10, MILLION):
        directory = tmp_path_factory.mktemp("logs") / str(num_events)
        started, on_cpu = time.perf_counter(), time.process_time()
        log = DurableLog.create(directory, flush=FlushPolicy(every_ms=50))
        events = drive([log], num_events)
        log.close()
        seconds = {"write_seconds": time.perf_counter() - started, "write_cpu_seconds": time.process_time() - on_cpu}
        made[num_events] = directory, {"events": events, **seconds}
    return made


def test_a_million_events_on_disk(benchmark, logs: dict[int, tuple[Path, dict]]) -> None:
    directory, facts = logs[MILLION]

    def read() -> int:
        return sum(len(commit.events) for commit in LogReader(directory).commits())

    assert benchmark.pedantic(read, rounds=1) == facts["events"]
    in_segments = sum(path.stat().st_size for path in directory.glob("segment-*"))
    benchmark.extra_info.update(
        facts,
        bytes_per_event=in_segments / facts["events"],
        events_written_per_s=facts["events"] / facts["write_seconds"],
        snapshot_bytes=sum(path.stat().st_size for path in directory.glob("snapshot-*")),
    )
    print(f"\n{benchmark.extra_info}")


VERIFY = """
import json, sys, time
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.sim.logs.verification import verify_log
started, on_cpu = time.perf_counter(), time.process_time()
found = verify_log(LogReader(sys.argv[1]))
seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - on_cpu
# Not ru_maxrss, in which the parent's peak lives on.
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
figures = {"events": found.events, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_kib": peak}
print(json.dumps({"sound": found.is_sound, **figures}))
"""


def verified(directory: Path) -> dict:
    out = subprocess.run([sys.executable, "-c", VERIFY, str(directory)], capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def test_verification_of_a_million_events_in_memory_that_does_not_grow(benchmark, logs) -> None:
    small = verified(logs[MILLION // 10][0])
    large = benchmark.pedantic(verified, args=(logs[MILLION][0],), rounds=1)
    assert small["sound"]
    assert large["sound"]
    benchmark.extra_info.update(
        events_verified_per_s=large["events"] / large["seconds"],
        events_verified_per_cpu_s=large["events"] / large["cpu_seconds"],
        peak_mib=large["peak_kib"] / 1024,
        peak_mib_of_a_tenth=small["peak_kib"] / 1024,
    )
    print(f"\n{benchmark.extra_info}")
    assert large["peak_kib"] < 1.25 * small["peak_kib"]


def test_the_state_in_the_middle_of_a_million_events(benchmark, logs) -> None:
    directory, _ = logs[MILLION]
    middle = LogReader(directory).manifest.next_commit // 2
    state = benchmark.pedantic(lambda: LogReader(directory).state(middle), rounds=3)
    assert state.next_sequence == middle
