"""nano-vllm's scheduler calls, against our block manager: every sequence reads back its own tokens."""

import random
from collections import deque

import attrs
import pytest
from kvledger.backends.engines.nano_vllm import LedgerBlockManager
from kvledger.core import EventLog, MisuseError
from kvledger.testing import check

SIZE = 4


@attrs.define(eq=False)
class Sequence:
    seq_id: int
    token_ids: list[int]
    max_tokens: int = 8
    num_cached_tokens: int = 0
    block_table: list[int] = attrs.field(factory=list)
    num_prompt_tokens: int = 0

    def __attrs_post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


class Engine:
    """Schedules as nano-vllm does: prompts first, then decodes, the newest sequence preempted where blocks run out."""

    def __init__(self, manager: LedgerBlockManager, num_blocks: int) -> None:
        self.manager = manager
        self.slots: list[int | None] = [None] * (num_blocks * SIZE)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.hits = self.preemptions = 0

    def write(self, seq: Sequence, start: int) -> None:
        for position in range(start, len(seq)):
            self.slots[seq.block_table[position // SIZE] * SIZE + position % SIZE] = seq.token_ids[position]

    def read(self, seq: Sequence) -> list[int | None]:
        return [self.slots[seq.block_table[i // SIZE] * SIZE + i % SIZE] for i in range(len(seq))]

    def step(self) -> None:
        served: list[Sequence] = []
        while self.waiting and len(self.running) < 6:
            cached = self.manager.can_allocate(self.waiting[0])
            if cached < 0:
                break
            seq = self.waiting.popleft()
            self.manager.allocate(seq, cached)
            self.hits += seq.num_cached_tokens
            self.write(seq, seq.num_cached_tokens)
            served.append(seq)
            self.running.append(seq)
        if not served:
            for _ in range(len(self.running)):
                if not self.running:
                    break
                seq = self.running.popleft()
                while not self.manager.can_append(seq):
                    victim = self.running.pop() if self.running else seq
                    self.manager.deallocate(victim)
                    self.waiting.appendleft(victim)
                    self.preemptions += 1
                    if victim is seq:
                        break
                else:
                    self.manager.may_append(seq)
                    self.write(seq, len(seq) - 1)
                    served.append(seq)
            self.running = deque(served)
        for seq in served:
            self.manager.hash_blocks(seq)
            assert self.read(seq) == seq.token_ids
            seq.token_ids.append((seq.seq_id * 31 + len(seq)) % 1000)
            if len(seq) - seq.num_prompt_tokens == seq.max_tokens:
                self.manager.deallocate(seq)
                self.running.remove(seq)


@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
@pytest.mark.parametrize("num_blocks", [14, 40])
def test_every_sequence_reads_back_its_own_tokens(num_blocks: int, eviction: str) -> None:
    log = EventLog()
    manager = LedgerBlockManager(num_blocks, SIZE, eviction=eviction, sinks=[log])
    engine = Engine(manager, num_blocks)
    rng = random.Random(1)
    shared = [[rng.randrange(1000) for _ in range(12)] for _ in range(3)]
    for number in range(60):
        prompt = rng.choice(shared)[: rng.choice((4, 8, 12))] + [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
        engine.waiting.append(Sequence(number, prompt, rng.randint(1, 16)))
    while engine.waiting or engine.running:
        engine.step()
        check(manager.ledger)
    assert engine.hits > 100
    assert (engine.preemptions > 0) == (num_blocks == 14)
    assert manager.ledger.num_free_blocks == num_blocks
    assert log.verify().snapshot() == manager.ledger.state.snapshot()


def test_blocks_that_are_not_free_are_refused_before_anything_changes() -> None:
    manager = LedgerBlockManager(4, SIZE)
    first, second, third = (Sequence(number, list(range(number * 50, number * 50 + 7))) for number in range(3))
    manager.allocate(first, manager.can_allocate(first))
    manager.allocate(second, manager.can_allocate(second))
    assert manager.can_allocate(third) == -1
    with pytest.raises(MisuseError, match="not free"):
        manager.allocate(third, 0)
    first.token_ids.append(1)
    manager.may_append(first)
    first.token_ids.append(2)
    assert not manager.can_append(first)
    with pytest.raises(MisuseError, match="can_append"):
        manager.may_append(first)
    assert first.block_table == [0, 1]


def test_allocate_without_can_allocate_is_refused() -> None:
    with pytest.raises(MisuseError, match="ask can_allocate"):
        LedgerBlockManager(2, SIZE).allocate(Sequence(0, [1, 2]), 0)
