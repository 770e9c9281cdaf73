"""The arithmetic of the GPU benches, on a clock of numbers: turns, medians, rotation past a cache, fractions, tables.

None of it needs a card, and none of it may give a figure that no clock gave.
"""

import statistics
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu_timing import (
    L2_MULTIPLE,
    MIN_SAMPLES,
    WAKE_UP_CYCLES,
    CudaClock,
    Row,
    Run,
    Timing,
    format_table,
    fraction_of_copy,
    num_rotations,
    time_in_turn,
)

MIB = 1 << 20


@attrs.define
class StepClock:
    """Runs everything, and says that run number n took n + 1 us."""

    log: list[str] = attrs.field(factory=list)
    first_us: float = 1.0

    def elapsed_us(self, runs: Sequence[Run]) -> list[float]:
        for run in runs:
            run()
        return [self.first_us + number for number in range(len(runs))]


def timing(*samples_us: float) -> Timing:
    """As many samples as are needed, of these values in turn."""
    return Timing(tuple(samples_us[number % len(samples_us)] for number in range(MIN_SAMPLES * len(samples_us))))


def lru_hits(num_sets: int, layers: int, layer_bytes: int, l2_bytes: int, rounds: int = 3) -> int:
    """Reads that find their source in an LRU cache of `L2_MULTIPLE` times the size, read set after set in turn."""
    cached: list[tuple[int, int]] = []
    hits = 0
    for number in range(rounds * num_sets):
        for layer in range(layers):
            source = (number % num_sets, layer)
            if source in cached:
                hits += 1
                cached.remove(source)
            cached.append(source)
            while len(cached) * layer_bytes > L2_MULTIPLE * l2_bytes:
                cached.pop(0)
    return hits


@given(
    layers=st.integers(1, 6),
    layer_bytes=st.integers(1, 8).map(lambda n: n * MIB),
    l2=st.integers(0, 40).map(MIB.__mul__),
)
def test_rotated_sources_are_never_found_in_the_cache_and_one_set_fewer_would_be(
    layers: int, layer_bytes: int, l2: int
) -> None:
    sets = num_rotations(layers * layer_bytes, layer_bytes, l2)
    between = sets * layers * layer_bytes - layer_bytes
    assert between >= L2_MULTIPLE * l2
    assert sets == 1 or between - layers * layer_bytes < L2_MULTIPLE * l2
    if between >= L2_MULTIPLE * l2 and layer_bytes * sets * layers > L2_MULTIPLE * l2:
        assert lru_hits(sets, layers, layer_bytes, l2) == 0


def test_rotation_of_the_benches_on_a_card_with_50_mib() -> None:
    # 8,192 tokens: 32 MiB a layer, 1 GiB a run. 256 tokens: 1 MiB a layer, 32 MiB a run.
    assert num_rotations(1024 * MIB, 32 * MIB, 50 * MIB) == 1
    assert num_rotations(32 * MIB, MIB, 50 * MIB) == 4


@pytest.mark.parametrize(("run_bytes", "source_bytes", "l2_bytes"), [(0, 0, 1), (10, 11, 1), (10, 5, -1)])
def test_rotation_of_nothing_is_refused(run_bytes: int, source_bytes: int, l2_bytes: int) -> None:
    with pytest.raises(ValueError, match="a run of"):
        num_rotations(run_bytes, source_bytes, l2_bytes)


def test_contenders_take_turns_and_each_takes_its_variants_in_turn() -> None:
    log: list[str] = []
    contenders = {
        "copy": [lambda: log.append("copy")],
        "write": [lambda: log.append("write 0"), lambda: log.append("write 1"), lambda: log.append("write 2")],
    }
    times = time_in_turn(StepClock(), contenders, rounds=MIN_SAMPLES, warm_up_rounds=2)
    assert log[:8] == ["copy", "write 0", "copy", "write 1", "copy", "write 2", "copy", "write 0"]
    assert len(log) == 2 * (MIN_SAMPLES + 2)
    # Rounds 0 and 1 warm up; in round r the copy is run number 2r, which took 2r + 1 us.
    assert times["copy"].samples_us == tuple(2 * number + 1 for number in range(2, MIN_SAMPLES + 2))
    assert times["write"].samples_us == tuple(2 * number + 2 for number in range(2, MIN_SAMPLES + 2))


@given(st.lists(st.floats(0.1, 1e6), min_size=MIN_SAMPLES, max_size=60))
def test_the_median_and_quartiles_are_those_of_the_samples(samples: list[float]) -> None:
    measured = Timing(tuple(samples))
    assert measured.median_us == statistics.median(samples)
    low, high = measured.quartiles_us
    assert min(samples) <= low <= measured.median_us <= high <= max(samples)


def test_one_slow_run_does_not_move_the_median() -> None:
    samples = [10.0] * (MIN_SAMPLES - 1)
    assert Timing((*samples, 9999.0)).median_us == 10.0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=f"needs at least {MIN_SAMPLES}"):
        Timing((1.0,) * (MIN_SAMPLES - 1))


@pytest.mark.parametrize("elapsed_us", [0.0, -1.0])
def test_a_run_that_the_clock_did_not_see_is_refused(elapsed_us: float) -> None:
    with pytest.raises(ValueError, match="did not see it"):
        Timing((*[1.0] * MIN_SAMPLES, elapsed_us))
    with pytest.raises(ValueError, match="did not see it"):
        time_in_turn(
            StepClock(first_us=elapsed_us - MIN_SAMPLES), {"a": [lambda: None]}, rounds=MIN_SAMPLES, warm_up_rounds=0
        )


def test_a_rate_is_bytes_over_the_median() -> None:
    assert timing(500.0).gigabytes_per_second(2_000_000_000) == pytest.approx(4000)


def test_a_fraction_compares_rates_so_that_fewer_bytes_are_no_advantage() -> None:
    write, copy = timing(100.0), timing(90.0)
    assert fraction_of_copy(write, 1000, copy, 1000) == pytest.approx(0.9)
    assert fraction_of_copy(write, 750, copy, 1000) == pytest.approx(0.675)


def test_the_table_shows_every_row_under_the_card_and_says_which_bounds_hold() -> None:
    rows = [
        Row(what="copy", timing=timing(500.0), num_bytes=2_000_000_000),
        Row(what="write", timing=timing(625.0), figure="0.800 of the copy", required=">= 0.90", holds=False),
        Row(what="slots", timing=timing(4.0), figure="4.0 us", required="<= 10 us", holds=True),
    ]
    card, headings, rule, *lines = format_table("A card, triton 3.6.0", rows).splitlines()
    assert card == "A card, triton 3.6.0"
    assert headings.split("  ")[0] == "device time"
    assert set(rule) == {"-"}
    assert [line.split()[0] for line in lines] == ["copy", "write", "slots"]
    assert "4,000" in lines[0]
    assert lines[1].endswith("NO")
    assert lines[2].endswith("yes")


@attrs.define
class FakeEvent:
    """Reads the number of things queued when it was recorded, as milliseconds."""

    queue: list[str]
    at_ms: float = -1.0

    def record(self) -> None:
        self.queue.append("event")
        self.at_ms = len(self.queue)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


def test_the_cuda_clock_wakes_the_card_queues_a_spin_and_two_events_around_every_run_and_reads_after_all() -> None:
    queue: list[str] = []

    class Cuda:
        @staticmethod
        def Event(enable_timing: bool) -> FakeEvent:
            assert enable_timing
            return FakeEvent(queue)

        @staticmethod
        def synchronize() -> None:
            queue.append("synchronize")

        @staticmethod
        def _sleep(cycles: int) -> None:
            queue.append("wake up" if cycles == WAKE_UP_CYCLES else "spin")

    class Torch:
        cuda = Cuda

    elapsed = CudaClock(Torch).elapsed_us([lambda: queue.append("first"), lambda: queue.append("second")])
    around = ["spin", "event", "first", "event", "spin", "event", "second", "event"]
    assert queue == ["wake up", "synchronize", *around, "synchronize"]
    assert elapsed == [2000.0, 2000.0]
