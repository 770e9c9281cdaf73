"""What the lifecycle costs in Python at the least: the bare data structures, no commands, checks, rows or tables.

    KVLEDGER_TRACES=DIR python -m bench.floor [--rounds 5]

The same prompts as the lifecycle benchmark through a dict, three lists and a ring in one straight loop: match, adopt,
take, register, release. Once without events; once with every event as a bare tuple in a list; and once as an
event-sourced ledger must do it at the least: seven named events a request, each folded into the state by a handler of
its own, in two commits that a log keeps. What the first one takes nothing in pure Python goes below; what our allocator
takes beyond the third is the price of what that loop lacks: checks, several groups, windows, forks, rollbacks, batches,
errors that explain.
"""

import argparse
import gc
import statistics
import time
from itertools import chain

from kvledger.core.events import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    Commit,
    Event,
    FreeReason,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
    named_tuple,
)

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


class FoldedLoop:
    """The straight loop as a fold: a handler changes the state by what its event says, and nothing else does."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_cnt, self.key_of, self.position_of = [0] * num_blocks, [None] * num_blocks, [0] * num_blocks
        self.index: dict[int, int] = {}
        self.ring = [0] * num_blocks + list(range(1, num_blocks)) + [0] * (num_blocks + 100)
        self.num_blocks, self.head, self.tail = num_blocks, num_blocks, 2 * num_blocks - 1
        self.position_of[1:] = range(self.head, self.tail)
        self.table: list[int] = []
        self.row_of: dict[str, int] = {}
        self.placed = 0
        self.log: list[tuple] = []

    def admit(self, name: str, keys: list[int], num_tokens: int) -> int:
        """Match, allocate and free one prompt, as two commits. Returns the blocks that hit."""
        num_needed = -(-num_tokens // 512)
        hits: list[int] = []
        for key in keys[: (num_tokens - 1) // 512]:
            block = self.index.get(key)
            if block is None:
                break
            hits.append(block)
        events: list[Event] = [self.assigned(named_tuple(RowsAssigned, ((name,), (0,))))]
        if hits:
            events.append(self.adopted(named_tuple(PrefixAdopted, (0, 0, tuple(hits)))))
        taken: list[int] = []
        while len(taken) < num_needed - len(hits):
            stop = self.head + num_needed - len(hits) - len(taken)
            taken += [block for block in self.ring[self.head : stop] if block]
            self.head = stop
        lost = tuple([self.key_of[block] for block in taken])
        columns = (0, (0,), (len(taken),), tuple(taken), lost, ())
        events.append(self.allocated(named_tuple(BlocksAllocated, columns)))
        start, stop = len(hits), len(keys)
        if stop > start:
            blocks, parent = tuple(self.table[start:stop]), keys[start - 1] if start else None
            columns = (
                0,
                (0,),
                (start,),
                (stop,),
                (stop - start,),
                tuple(range(start, stop)),
                blocks,
                tuple(keys[start:]),
                (parent,),
            )
            events.append(self.cached(named_tuple(BlocksCached, columns)))
        columns = ((0,), (start * 512,), (num_tokens - start * 512,))
        events.append(self.tokens(named_tuple(TokensPlaced, columns)))
        self.commit(events)
        columns = (FreeReason.FINISHED, (0,), (0,), (num_needed,), tuple(self.table[::-1]), ())
        freed = self.freed(named_tuple(BlocksFreed, columns))
        self.commit([freed, self.released(named_tuple(RowsReleased, ((name,), (0,))))])
        return len(hits)

    def commit(self, events: list[Event]) -> None:
        """The log keeps one bare tuple a commit."""
        sequence, events_kept = named_tuple(Commit, (len(self.log), tuple(events)))
        self.log.append((sequence, *chain.from_iterable(events_kept)))

    def assigned(self, event: RowsAssigned) -> RowsAssigned:
        (name,), (row,) = event
        self.row_of[name] = row
        return event

    def released(self, event: RowsReleased) -> RowsReleased:
        (name,), _ = event
        del self.row_of[name]
        return event

    def adopted(self, event: PrefixAdopted) -> PrefixAdopted:
        _, _, blocks = event
        for block in blocks:
            if not self.ref_cnt[block]:
                self.ring[self.position_of[block]] = 0
            self.ref_cnt[block] += 1
        self.table += blocks
        return event

    def allocated(self, event: BlocksAllocated) -> BlocksAllocated:
        _, _, _, blocks, lost_keys, _ = event
        ref_cnt, key_of, index = self.ref_cnt, self.key_of, self.index
        for block, key in zip(blocks, lost_keys, strict=True):
            ref_cnt[block] = 1
            if key is not None:
                del index[key]
                key_of[block] = None
        self.table += blocks
        return event

    def cached(self, event: BlocksCached) -> BlocksCached:
        _, _, _, _, _, _, blocks, keys, _ = event
        key_of, index = self.key_of, self.index
        for block, key in zip(blocks, keys, strict=True):
            if key not in index:
                key_of[block] = key
                index[key] = block
        return event

    def tokens(self, event: TokensPlaced) -> TokensPlaced:
        _, (first,), (count,) = event
        self.placed = first + count
        return event

    def freed(self, event: BlocksFreed) -> BlocksFreed:
        blocks = event.blocks
        ref_cnt, key_of, position_of = self.ref_cnt, self.key_of, self.position_of
        if self.head < len(blocks) or self.tail + len(blocks) > len(self.ring):
            live = [block for block in self.ring[self.head : self.tail] if block]
            self.head, self.tail = self.num_blocks, self.num_blocks + len(live)
            self.ring[self.head : self.tail] = live
            for position, block in enumerate(live, self.head):
                position_of[block] = position
        ring, head, tail = self.ring, self.head, self.tail
        for block in blocks:
            ref_cnt[block] -= 1
            if ref_cnt[block]:
                continue
            if key_of[block] is None:
                head -= 1
                ring[head], position_of[block] = block, head
            else:
                ring[tail], position_of[block] = block, tail
                tail += 1
        self.head, self.tail = head, tail
        self.table = []
        return event


def folded(prompts: list[tuple[list[int], int]], num_blocks: int) -> tuple[float, int]:
    """Seconds of CPU for all prompts as a fold of events, and the blocks that hit."""
    loop = FoldedLoop(num_blocks)
    num_hits = 0
    gc.collect()
    started = time.process_time()
    for number, (keys, num_tokens) in enumerate(prompts):
        if -(-num_tokens // 512) < num_blocks:
            num_hits += loop.admit(str(number), keys, num_tokens)
    return time.process_time() - started, num_hits


def main() -> None:
    """Print microseconds of CPU a request, all four in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = workloads.conversation_rows()
    if rows is None:
        raise SystemExit("KVLEDGER_TRACES is not set: no conversation trace")
    prompts = [(row["hash_ids"][: row["input_length"] // 512], row["input_length"]) for row in rows]
    workloads.clock = time.process_time
    print(f"{'blocks':>7}  {'bare':>6}  {'bare, events':>12}  {'folded':>6}  {'kvledger':>8}   us of CPU a request")
    for num_blocks, expected in workloads.HIT_BLOCKS.items():
        figures: tuple[list[float], ...] = ([], [], [], [])
        for _ in range(rounds):
            measured = (
                straight_line(prompts, num_blocks, False),
                straight_line(prompts, num_blocks, True),
                folded(prompts, num_blocks),
                (workloads.lifecycle(rows, num_blocks), expected),
            )
            for seconds_of, (seconds, num_hits) in zip(figures, measured, strict=True):
                assert num_hits == expected or len(rows) != 12_031
                seconds_of.append(seconds)
        bare, events, fold, ours = (statistics.median(values) / len(rows) * 1e6 for values in figures)
        print(f"{num_blocks:7,}  {bare:6.1f}  {events:12.1f}  {fold:6.1f}  {ours:8.1f}")


if __name__ == "__main__":
    main()
