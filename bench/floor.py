"""What the lifecycle costs in Python at the least: the bare data structures, no commands, checks, rows or tables.

    KVLEDGER_TRACES=DIR python -m bench.floor [--rounds 5]

The same prompts as the lifecycle benchmark through a dict, three lists and a ring in one straight loop: match, adopt,
take, register, release. Once without events, and once with every event as a bare tuple in a list. What our allocator
takes beyond the second figure is the price of its protocol; what the first one takes nothing in pure Python goes below.
"""

import argparse
import gc
import statistics
import time

from bench import workloads


def straight_line(prompts: list[tuple[list[int], int]], num_blocks: int, with_events: bool) -> tuple[float, int]:
    """Seconds of CPU for all prompts, and the blocks that hit."""
    ref_cnt, key_of, position_of = [0] * num_blocks, [None] * num_blocks, [0] * num_blocks
    index: dict[int, int] = {}
    ring = [0] * num_blocks + list(range(1, num_blocks)) + [0] * (num_blocks + 100)
    head, tail = num_blocks, 2 * num_blocks - 1
    position_of[1:] = range(head, tail)
    log: list[tuple] = []
    num_hits = 0
    gc.collect()
    started = time.process_time()
    for number, (keys, num_tokens) in enumerate(prompts):
        num_needed = -(-num_tokens // 512)
        if num_needed > num_blocks - 1:
            continue
        hits = []
        for key in keys[: (num_tokens - 1) // 512]:
            block = index.get(key)
            if block is None:
                break
            hits.append(block)
        for block in hits:
            if not ref_cnt[block]:
                ring[position_of[block]] = 0
            ref_cnt[block] += 1
        num_new = num_needed - len(hits)
        taken: list[int] = []
        while len(taken) < num_new:
            stop = head + num_new - len(taken)
            taken += [block for block in ring[head:stop] if block]
            head = stop
        lost = []
        for block in taken:
            ref_cnt[block] = 1
            key = key_of[block]
            lost.append(key)
            if key is not None:
                del index[key]
                key_of[block] = None
        new_keys = keys[len(hits) :]
        for block, key in zip(taken, new_keys, strict=False):  # the last block may be partial
            if key not in index:
                key_of[block] = key
                index[key] = block
        blocks = (*hits, *taken)
        if with_events:
            name, first, count = str(number), len(hits), (num_new,)
            log.append(
                (
                    ((name,), (0,)),
                    (0, 0, tuple(hits)),
                    (0, (0,), count, tuple(taken), tuple(lost), ()),
                    (0, (0,), (first,), (num_needed,), count, tuple(range(first, num_needed)), blocks, tuple(new_keys)),
                    ((0,), (first * 512,), (num_tokens,)),
                )
            )
            log.append(((1, 0, 0, (num_needed,), blocks[::-1]), ((name,), (0,))))
        num_hits += len(hits)
        if head < len(blocks) or tail + len(blocks) > len(ring):
            live = [block for block in ring[head:tail] if block]
            head, tail = num_blocks, num_blocks + len(live)
            ring[head:tail] = live
            for position, block in enumerate(live, head):
                position_of[block] = position
        for block in reversed(blocks):
            ref_cnt[block] -= 1
            if ref_cnt[block]:
                continue
            if key_of[block] is None:
                head -= 1
                ring[head], position_of[block] = block, head
            else:
                ring[tail], position_of[block] = block, tail
                tail += 1
    return time.process_time() - started, num_hits


def main() -> None:
    """Print microseconds of CPU a request, all three in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = workloads.conversation_rows()
    if rows is None:
        raise SystemExit("KVLEDGER_TRACES is not set: no conversation trace")
    prompts = [(row["hash_ids"][: row["input_length"] // 512], row["input_length"]) for row in rows]
    workloads.clock = time.process_time
    print(f"{'blocks':>7}  {'bare':>6}  {'bare, events':>12}  {'kvledger':>8}   us of CPU a request")
    for num_blocks, expected in workloads.HIT_BLOCKS.items():
        figures: tuple[list[float], ...] = ([], [], [])
        for _ in range(rounds):
            for with_events in (False, True):
                seconds, num_hits = straight_line(prompts, num_blocks, with_events)
                assert num_hits == expected or len(rows) != 12_031
                figures[with_events].append(seconds)
            figures[2].append(workloads.lifecycle(rows, num_blocks))
        bare, events, ours = (statistics.median(values) / len(rows) * 1e6 for values in figures)
        print(f"{num_blocks:7,}  {bare:6.1f}  {events:12.1f}  {ours:8.1f}")


if __name__ == "__main__":
    main()
