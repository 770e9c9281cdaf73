"""Does the cost grow with the work? Time per block, request and step from small to large, and a plot of it.

    python -m bench.scaling [--rounds 5] [--plot scaling.svg]

Sizes take turns within a round, so that a busy minute of the machine hits all of them alike; medians over the rounds.
A flat cost is one within 1.3 times of the smallest size's.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvledger.core import EventLog, KVCacheAllocator, Request

from bench.workloads import ListedKeys, allocator_for

POOLS = (10_000, 100_000, 1_000_000)
REQUESTS = (1_000, 10_000, 100_000)
BLOCKS_A_REQUEST = 24


def lifecycle_ns(allocator: KVCacheAllocator, num_requests: int, first: int) -> float:
    """Nanoseconds a block: match, allocate and free of prompts of 24 blocks, all new, in a full pool."""
    requests = [
        Request(str(i), 16 * BLOCKS_A_REQUEST, 1, ListedKeys(list(range(i * 100, i * 100 + BLOCKS_A_REQUEST))))
        for i in range(first, first + num_requests)
    ]
    gc.collect()
    started = time.perf_counter_ns()
    for request in requests:
        assert allocator.allocate(request, request.num_tokens, allocator.match_prefix(request)) is not None
        allocator.free(request.request_id)
    return (time.perf_counter_ns() - started) / (num_requests * BLOCKS_A_REQUEST)


def in_a_full_pool(num_blocks: int) -> Callable[[int], float]:
    """Prompts in a pool whose every block carries a key already: each block taken evicts one."""
    allocator = allocator_for(num_blocks, 16, log=False)
    pool = allocator.pool
    fill = Request("fill", 16 * (num_blocks - 1), 1, ListedKeys(list(range(-num_blocks, 0))))
    blocks = pool.free_queue.peek(num_blocks - 1)
    assert len(blocks) == num_blocks - 1 and fill.num_tokens
    pool.take(blocks)
    pool.cache(0, blocks, [-1 - block for block in blocks], range(len(blocks)))
    pool.release(blocks)
    return lambda round_: lifecycle_ns(allocator, 400, round_ * 400)


def after_requests(num_requests: int) -> Callable[[int], float]:
    """Prompts after `num_requests` others have come and gone, every event of theirs in a log."""
    allocator = allocator_for(10_000, 16)
    for i in range(num_requests):
        allocator.allocate(Request(f"old-{i}", 16, 1, ListedKeys([-i - 1])), 16)
        allocator.free(f"old-{i}")
    (log,) = allocator.sinks
    assert isinstance(log, EventLog) and len(log) == 2 * num_requests + 1
    return lambda round_: lifecycle_ns(allocator, 400, round_ * 400)


def decode_in(num_blocks: int) -> Callable[[int], float]:
    """Nanoseconds a request and step: 64 decode steps of 128 running requests, blocks filling up on the way."""
    allocator = allocator_for(num_blocks, 16, 128, log=False)
    for i in range(128):
        keys = ListedKeys([i * 100_000 + j for j in range(2_000)])
        assert allocator.allocate(Request(str(i), 128, 1 << 20, keys), 128) is not None
    rows = np.array([allocator.row_of(str(i)) for i in range(128)], dtype=np.int64)

    def once(_round: int) -> float:
        gc.collect()
        started = time.perf_counter_ns()
        for _ in range(64):
            assert allocator.append(rows)
        return (time.perf_counter_ns() - started) / (64 * 128)

    return once


def measure(makers: dict[int, Callable[[int], float]], rounds: int) -> dict[int, float]:
    """The median of each size, sizes in turn."""
    figures: dict[int, list[float]] = {size: [] for size in makers}
    for round_ in range(rounds + 1):
        for size, once in makers.items():
            nanoseconds = once(round_)
            if round_:  # the first one warms up
                figures[size].append(nanoseconds)
    return {size: statistics.median(values) for size, values in figures.items()}


def main() -> None:
    """Print the table; draw the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    lines = {
        "lifecycle, ns a block, by blocks of the pool": measure({n: in_a_full_pool(n) for n in POOLS}, options.rounds),
        "decode, ns a request and step, by blocks of the pool": measure(
            {n: decode_in(n) for n in POOLS}, options.rounds
        ),
        "lifecycle, ns a block, by requests before": measure({n: after_requests(n) for n in REQUESTS}, options.rounds),
    }
    for name, figures in lines.items():
        smallest = min(figures)
        print(name)
        for size, nanoseconds in figures.items():
            print(f"  {size:>9,}  {nanoseconds:8.1f} ns  {nanoseconds / figures[smallest]:5.2f}x")
    if options.plot is not None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        for name, figures in lines.items():
            axes.plot(list(figures), [ns / figures[min(figures)] for ns in figures.values()], marker="o", label=name)
        axes.axhline(1.3, linestyle="--", color="grey", label="goal: 1.3")
        axes.set(xscale="log", ylim=(0, 2), xlabel="blocks, or requests", ylabel="cost over that of the smallest size")
        axes.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(options.plot)


if __name__ == "__main__":
    main()
