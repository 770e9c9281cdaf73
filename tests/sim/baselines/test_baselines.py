"""Allocators compared: the published figures, an independent simulation, and conservation."""

import random
from functools import partial
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.errors import DoesNotFitError, InputError
from kvledger.sim.baselines.baselines import MAX_SAMPLES, AllocatorUsage, Fragmentation, compare_allocators

NAMES = ["static", "pow2", "oracle", "growing", "paged"]
SEEDS = range(4)

# PagedAttention (SOSP'23), Fig. 2 and 13: OPT-13B on one A100-40GB, 12 GB of KV memory = 15,700 token slots.
PAPER = {"num_slots": 15_700, "max_model_len": 2_048, "block_size": 16}
PUBLISHED_PCT = {  # token states, reservation, internal, external and other; None: not published
    "static": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
PUBLISHED_MEAN_BATCH = {"static": 7.00, "pow2": 9.81, "oracle": 13.62}


def sharegpt_like(seed: int, num_requests: int = 4_000) -> list[tuple[int, int]]:
    """Lognormal prompts of at most 1,024 tokens and gamma outputs, at most 2,048 in all; draws beyond are repeated."""
    draw, lengths = random.Random(seed), []
    while len(lengths) < num_requests:
        prompt = max(1, round(draw.lognormvariate(4.55, 1.0)))
        output = max(1, round(draw.gammavariate(1.32, 338 / 1.32)))
        if prompt <= 1_024 and prompt + output <= 2_048:
            lengths.append((prompt, output))
    return lengths


def shares(usage: AllocatorUsage) -> tuple[float, float, float, float]:
    return usage.token_pct, usage.reservation_pct, usage.internal_pct, usage.external_pct


@pytest.fixture(scope="module")
def by_seed() -> list[dict[str, AllocatorUsage]]:
    runs = (compare_allocators(sharegpt_like(seed), **PAPER) for seed in SEEDS)
    return [{usage.name: usage for usage in run} for run in runs]


@pytest.mark.parametrize("name", PUBLISHED_PCT)
def test_every_published_share_is_met_within_two_and_a_half_points(by_seed, name: str) -> None:
    means = [fmean(column) for column in zip(*(shares(run[name]) for run in by_seed), strict=True)]
    for ours, published in zip(means, PUBLISHED_PCT[name], strict=True):
        if published is not None:
            assert ours == pytest.approx(published, abs=2.5)


@pytest.mark.parametrize("name", PUBLISHED_PCT)
def test_no_seed_strays_far_from_the_published_shares(by_seed, name: str) -> None:
    for run in by_seed:
        for ours, published in zip(shares(run[name]), PUBLISHED_PCT[name], strict=True):
            if published is not None:
                assert ours == pytest.approx(published, abs=3.5)


def test_the_waste_of_paged_memory_is_below_the_published_four_percent(by_seed) -> None:
    for run in by_seed:
        assert 100 - run["paged"].token_pct < 4


@pytest.mark.parametrize("name", PUBLISHED_MEAN_BATCH)
def test_the_published_mean_batch_is_met_within_four_percent(by_seed, name: str) -> None:
    assert fmean(run[name].mean_batch for run in by_seed) == pytest.approx(PUBLISHED_MEAN_BATCH[name], rel=0.04)


def test_the_less_an_allocator_wastes_the_more_requests_it_runs(by_seed) -> None:
    for run in by_seed:
        batches = [run[name].mean_batch for name in NAMES]
        assert batches == sorted(batches)
        assert run["paged"].mean_batch > 2 * run["oracle"].mean_batch
        assert [run[name].preemptions for name in ("static", "pow2", "oracle")] == [0, 0, 0]


def test_growing_copies_and_leaves_holes(by_seed) -> None:
    for run in by_seed:
        growth = run["growing"].growth
        assert growth.num_copies > 1_000
        assert growth.copied_tokens > 100 * growth.num_copies
        assert 0.5 < growth.fragmentation.mean < growth.fragmentation.max < 1
        assert MAX_SAMPLES / 2 <= len(growth.fragmentation.samples) <= MAX_SAMPLES


def test_a_full_region_moves_and_the_last_admitted_yields_where_no_hole_is_large_enough() -> None:
    # Two regions of 4 slots fill in their second iteration. The first moves into the free 8; nothing is left for the
    # second, which waits for one iteration and then takes the 8 slots that both have left.
    growing = compare_allocators([(2, 6), (2, 6)], num_slots=16, max_model_len=16, block_size=4)[3]
    assert (growing.growth.num_copies, growing.growth.copied_tokens) == (1, 4)
    assert (growing.preemptions, growing.max_preemptions_per_request, growing.finished) == (1, 1, 2)
    assert (growing.iterations, growing.max_batch) == (1, 2)
    assert shares(growing) == (500 / 16, 300 / 16, 0, 50)  # the first holds 5 of 8 slots and will fill all of them


def test_copied_bytes_need_the_bytes_of_a_token() -> None:
    lengths = sharegpt_like(0, 200)
    unknown = compare_allocators(lengths, **PAPER)[3].growth
    known = compare_allocators(lengths, **PAPER, kv_bytes_per_token=819_200)[3].growth
    assert unknown.copied_bytes is None
    assert known.copied_bytes == known.copied_tokens * 819_200 > 0


def naive_static(lengths: list[tuple[int, int]], num_slots: int, max_model_len: int) -> tuple[float, ...]:
    """One iteration at a time. Equal chunks of a power of two fill a pool of a power of two without holes."""
    waiting, running, sums, iterations = list(lengths), [], [0, 0, 0, 0], 0
    places = num_slots // max_model_len
    while waiting:
        running = [(prompt, output, done) for prompt, output, done in running if done < output]
        while waiting and len(running) < places:
            running.append((*waiting.pop(0), 0))
        if not waiting:
            break
        running = [(prompt, output, done + 1) for prompt, output, done in running]
        tokens = sum(prompt + done for prompt, _, done in running)
        total = sum(prompt + output for prompt, output, _ in running)
        asked = len(running) * max_model_len
        sums = [a + b for a, b in zip(sums, (tokens, total - tokens, asked - total, num_slots - asked), strict=True)]
        iterations += 1
    return tuple(100 * part / num_slots / iterations for part in sums) if iterations else ()


def naive_paged(lengths: list[tuple[int, int]], num_slots: int, size: int) -> tuple[tuple[float, ...], int]:
    """One iteration at a time: shares and preemptions. The first admitted grows first, the last admitted yields."""
    usable = num_slots // size - 1
    waiting, running, sums, iterations, preemptions = list(lengths), [], [0, 0, 0, 0], 0, 0

    def free() -> int:
        return usable - sum(blocks for *_, blocks in running)

    while waiting or running:
        running = [sequence for sequence in running if sequence[2] < sequence[1]]
        was_preempted = False
        for sequence in list(running):
            while sequence in running and -(-(sequence[0] + sequence[2] + 1) // size) > sequence[3]:
                if free():
                    sequence[3] += 1
                    continue
                prompt, output, done, _ = running.pop()
                waiting.insert(0, (prompt + done, output - done))
                preemptions, was_preempted = preemptions + 1, True
        while waiting and not was_preempted and -(-(waiting[0][0] + 1) // size) <= free():
            prompt, output = waiting.pop(0)
            running.append([prompt, output, 0, -(-(prompt + 1) // size)])
        for sequence in running:
            sequence[2] += 1
        if waiting:
            tokens = sum(prompt + done for prompt, _, done, _ in running)
            filled = sum(min(blocks * size, prompt + output) for prompt, output, _, blocks in running)
            asked = sum(blocks * size for *_, blocks in running)
            parts = (tokens, filled - tokens, asked - filled, num_slots - asked)
            sums = [a + b for a, b in zip(sums, parts, strict=True)]
            iterations += 1
    return tuple(100 * part / num_slots / iterations for part in sums) if iterations else (), preemptions


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=25)


@given(lengths=LENGTHS)
def test_static_equals_an_iteration_by_iteration_simulation(lengths: list[tuple[int, int]]) -> None:
    lengths = [(prompt, min(output, 16 - prompt)) for prompt, output in lengths]
    static = compare_allocators(lengths, num_slots=64, max_model_len=16, block_size=4)[0]
    expected = naive_static(lengths, 64, 16)
    assert static.queue_saturated == bool(expected)
    if expected:
        assert shares(static) == pytest.approx(expected)


@given(lengths=LENGTHS, num_slots=st.integers(32, 60), block_size=st.sampled_from([1, 2, 4]))
def test_paged_equals_an_iteration_by_iteration_simulation(lengths, num_slots: int, block_size: int) -> None:
    paged = compare_allocators(lengths, num_slots=num_slots, max_model_len=21, block_size=block_size, watermark=0)[-1]
    expected, preemptions = naive_paged(lengths, num_slots, block_size)
    assert paged.queue_saturated == bool(expected)
    assert paged.preemptions == preemptions
    if expected:
        assert shares(paged) == pytest.approx(expected)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=40),
    num_slots=st.integers(1, 120),
    max_model_len=st.integers(1, 80),
    block_size=st.integers(1, 20),
    max_num_seqs=st.none() | st.integers(1, 5),
)
def test_every_request_is_accounted_for_and_the_shares_add_up(
    lengths, num_slots: int, max_model_len: int, block_size: int, max_num_seqs: int | None
) -> None:
    compare = partial(
        compare_allocators,
        num_slots=num_slots,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
    )
    try:
        usages = compare(lengths)
    except DoesNotFitError:
        assert all(sum(pair) == 0 or sum(pair) > min(max_model_len, num_slots) for pair in lengths)
        return
    too_long = sum(sum(pair) > max_model_len for pair in lengths)
    for usage in usages:
        assert usage.finished + usage.refused + usage.empty == len(lengths)
        assert usage.refused_too_long == too_long <= usage.refused
        assert usage.empty == lengths.count((0, 0))
        assert sum(shares(usage)) == pytest.approx(100)
        assert min(shares(usage)) >= 0
        assert usage.mean_batch <= usage.max_batch <= (max_num_seqs or len(lengths))
    assert compare(iter(lengths)) == usages


def test_the_watermark_holds_back_an_admission_but_never_the_only_one() -> None:
    lengths = [(40, 8), (40, 8)]  # 3 blocks of 16 each, of 8 usable
    assert [
        compare_allocators(lengths, num_slots=9 * 16, max_model_len=64, block_size=16, watermark=watermark)[
            -1
        ].max_batch
        for watermark in (0, 0.25, 0.5, 0.99)
    ] == [2, 2, 1, 1]


def test_a_request_that_can_never_fit_is_refused_and_those_behind_it_are_served() -> None:
    lengths = [(10, 10), (2_000, 100), (10, 10)]
    for usage in compare_allocators(lengths, **PAPER):
        assert (usage.finished, usage.refused, usage.refused_too_long) == (2, 1, 1)
        assert not usage.queue_saturated


def test_an_allocator_whose_reservation_exceeds_the_memory_serves_nobody() -> None:
    static, *others = compare_allocators([(10, 10)] * 3, num_slots=1_000, max_model_len=2_048, block_size=16)
    assert (static.finished, static.refused, static.refused_too_long) == (0, 3, 0)
    assert shares(static) == (0, 0, 0, 100)
    assert [usage.finished for usage in others] == [3, 3, 3, 3]


def test_nothing_fits_is_an_answer_with_the_numbers() -> None:
    with pytest.raises(DoesNotFitError, match="shortest has 2,049 tokens"):
        compare_allocators([(2_000, 49), (3_000, 1)], **PAPER)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_slots": 0}, "num_slots is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token is 0"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"requests": []}, "no requests"),
        ({"requests": [(1, 1), (5, -1)]}, r"request 1 has the lengths \(5, -1\)"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict, named: str) -> None:
    arguments = {"requests": [(10, 10)], **PAPER, **change}
    with pytest.raises(InputError, match=named):
        compare_allocators(arguments.pop("requests"), **arguments)


def test_fragmentation_samples_stay_bounded_and_evenly_spaced() -> None:
    fragmentation = Fragmentation()
    for iteration in range(0, 10_000, 5):
        fragmentation.add(iteration / 10_000, iteration, 5)
    iterations = [iteration for iteration, _ in fragmentation.samples]
    assert len(iterations) <= MAX_SAMPLES
    assert len({later - earlier for earlier, later in pairwise(iterations)}) == 1
    assert all(value == iteration // 5 * 5 / 10_000 for iteration, value in fragmentation.samples)
    assert fragmentation.mean == pytest.approx(0.49975)
    assert fragmentation.max == pytest.approx(0.9995)
