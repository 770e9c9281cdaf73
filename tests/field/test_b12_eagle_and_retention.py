"""B12: with EAGLE or MTP an identical prompt finds what vLLM 0.32 finds."""

import random

import pytest
from kvledger.core import FullAttention, Scheduler, SequenceState, SlidingWindow
from kvledger.core.scheduler.config import SchedulerConfig


def serve_one_by_one(ledger, prompts: list[list[int]], budget: int = 8192) -> list[int]:
    """Serve requests one after another, in the chunks that the scheduler makes. Returns the hit of each."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget), ledger.allocator)
    hits = []
    for number, tokens in enumerate(prompts):
        request = ledger.request(f"{number}", tokens)
        request.max_tokens = 1
        scheduler.submit(request)
        while scheduler.has_unfinished:
            step = scheduler.schedule()
            assert step is not None
            scheduler.complete(step)
        hits.append(request.num_cached_tokens)
    return hits


def tokens(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 90_000) for _ in range(count)]


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("length, hit", [(3784, 0), (7542, 4288), (11_292, 8576), (15_019, 12_864), (18_770, 15_008)])
def test_b12_states_of_large_blocks(ledger_of, length: int, hit: int, retention: int | None) -> None:
    groups = [FullAttention(2144), SequenceState(2144)]
    ledger = ledger_of(4000, groups=groups, use_eagle=True, retention_interval=retention)
    assert serve_one_by_one(ledger, [tokens(length)] * 2) == [0, hit]
    assert hit == max(0, (length - 1) // 2144 - 1) * 2144


@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("window", [64, 1024])
def test_b12_windows(ledger_of, window: int, retention: int | None) -> None:
    groups = [FullAttention(16), SlidingWindow(16, window)]
    ledger = ledger_of(4000, groups=groups, use_eagle=True, retention_interval=retention)
    prompt = tokens(4096)
    # The same prompt leaves its last token to compute; a longer one finds the last block, and gives it back.
    assert serve_one_by_one(ledger, [prompt, prompt, [*prompt, *tokens(100, seed=2)]]) == [0, 4080, 4080]


@pytest.mark.parametrize(
    "eagle, order",
    [
        (True, [12, 11, 10, *range(13, 21), 4, 3, 2, 1, 9, 8, 7, 6, 5]),
        (False, [12, 11, 6, 5, 4, *range(13, 21), 3, 2, 1, 10, 9, 8, 7]),
    ],
)
def test_b12_the_block_in_which_a_prompt_ends_is_reused_as_late_as_in_vllm(ledger_of, eagle: bool, order) -> None:
    """120 tokens: block 4 is not complete, and has the key of its first 16 tokens under EAGLE [0.32]."""
    groups = [FullAttention(32), SlidingWindow(16, 64)]
    ledger = ledger_of(20, groups=groups, use_eagle=eagle, retention_interval=0)
    request = ledger.request("x", tokens(120))
    assert ledger.allocator.allocate(request, 120) is not None
    ledger.allocator.free("x")
    assert ledger.allocator.pool.free_queue.order() == order
