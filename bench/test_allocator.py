"""The allocator's hot paths. `pytest bench --benchmark-enable` times them; without the flag they run once, as tests."""

import statistics

import pytest

from bench import workloads


@pytest.fixture(scope="module")
def conversation() -> list[dict]:
    rows = workloads.conversation_rows()
    if rows is None:
        pytest.skip("KVLEDGER_TRACES is not set: no conversation trace to drive the allocator with")
    return rows


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 50_000])
def test_lifecycle_of_the_conversation_prompts(benchmark, conversation, num_blocks: int) -> None:
    benchmark.pedantic(workloads.lifecycle, args=(conversation, num_blocks), rounds=5)


@pytest.mark.parametrize("num_reqs", [16, 256])
def test_decode_steps(benchmark, num_reqs: int) -> None:
    benchmark.pedantic(workloads.decode_steps, args=(num_reqs,), rounds=5)


def test_take_and_release_with_every_block_evicted(benchmark) -> None:
    benchmark.pedantic(workloads.take_and_release, rounds=5)


def test_full_prefix_hit(benchmark) -> None:
    benchmark.pedantic(workloads.full_hit, rounds=20)


def test_a_pool_of_a_million_blocks_takes_at_most_64_bytes_a_block(benchmark) -> None:
    _, bytes_per_block = benchmark.pedantic(workloads.construct_pool, rounds=3)
    assert bytes_per_block <= 64


@pytest.mark.parametrize(
    ("num_reqs", "tokens_each", "first_position"),
    [(1, 8192, 0), (64, 128, 0), (256, 32, 0), (1, 8192, 5), (64, 128, 5)],
)
def test_slot_mapping_of_8192_tokens(benchmark, num_reqs: int, tokens_each: int, first_position: int) -> None:
    """`extra_info` (--benchmark-json) holds its time over that of plain NumPy, timed in turn with it."""
    plain = workloads.plain_slot_mapping(num_reqs, tokens_each)
    plain_seconds: list[float] = []
    once = workloads.slot_mapping(num_reqs, tokens_each, first_position)
    rounds = 500 if benchmark.enabled else 1
    seconds = benchmark.pedantic(once, setup=lambda: plain_seconds.append(plain()), rounds=rounds)
    assert seconds > 0
    if benchmark.enabled:
        benchmark.extra_info["ratio_to_plain_numpy"] = benchmark.stats.stats.median / statistics.median(plain_seconds)
