"""The profiler's procedure against a device whose memory is arithmetic: order, figures, refusals, restored settings."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import pytest
from kvledger.backends.profiling.device import AllocatorBytes
from kvledger.backends.profiling.graph_memory import GraphCaptures
from kvledger.backends.profiling.probe import DeviceProbe, HostDevice
from kvledger.backends.profiling.profiler import MeasuredMemory, MemoryProfiler
from kvledger.backends.profiling.step import ProfilingStep, StepLimits
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.memory.budget import MemoryCondition, MemoryShortfallError
from kvledger.core.memory.ledger import MemoryBudget, MemoryLedger, RowSource, sum_bytes
from kvledger.core.memory.profile import MemoryKind

GIB = 1 << 30
MIB = 1 << 20
SETTINGS = "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,>:4]"


@attrs.define
class Card:
    """A card of 80 GiB: what is taken from it is written down, and every call is remembered."""

    calls: list[str] = attrs.field(factory=list)
    settings: str = SETTINGS
    others_bytes: int = 10 * GIB
    context_bytes: int = GIB // 2
    allocated_bytes: int = 0
    peak_bytes: int = 0
    cached_bytes: int = 0
    attributes_process: bool = True
    has_native_allocator: bool = True
    name: str = "cuda:0 (a card of arithmetic)"
    kind: MemoryKind = MemoryKind.DEVICE
    total_bytes: int = 80 * GIB
    overridden: dict[str, Any] = attrs.field(factory=dict)

    def allocate(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, num_bytes: int) -> None:
        """Freed memory stays reserved until the cache is emptied."""
        self.allocated_bytes -= num_bytes
        self.cached_bytes += num_bytes

    def part(self, name: str, transient_bytes: int, kept_bytes: int = 0) -> Callable[..., str]:
        """A callable that needs memory for its own time only, and keeps some."""

        def run(*arguments: object) -> str:
            self.calls.append(f"{name}{arguments}")
            self.allocate(transient_bytes + kept_bytes)
            self.free(transient_bytes)
            return f"output of {name}"

        return run

    # -- DeviceAccess --------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self.calls.append("warm_up")
        self.context_bytes += 40 * MIB
        self.allocate(32 * MIB)

    def release_cached(self) -> None:
        self.calls.append("release_cached")
        self.cached_bytes = 0

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.calls.append("read")
        held = self.others_bytes + self.context_bytes + self.allocated_bytes + self.cached_bytes
        return self.overridden.get("free", self.total_bytes - held), self.total_bytes

    def allocator_bytes(self) -> AllocatorBytes:
        counted = AllocatorBytes(
            allocated_bytes=self.allocated_bytes,
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.allocated_bytes + self.cached_bytes,
        )
        return attrs.evolve(counted, **{k: v for k, v in self.overridden.items() if k not in ("free", "process")})

    def process_bytes(self) -> int | None:
        if not self.attributes_process:
            return None
        return self.overridden.get("process", self.context_bytes + self.allocated_bytes + self.cached_bytes)

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")
        self.peak_bytes = self.allocated_bytes

    def allocator_settings(self) -> str:
        return self.settings

    def set_allocator_settings(self, settings: str) -> None:
        self.calls.append(f"set {settings}")
        self.settings = settings

    def inference_mode(self) -> AbstractContextManager[Any]:
        @contextmanager
        def block() -> Any:
            self.calls.append("inference mode")
            yield
            self.calls.append("end of inference mode")

        return block()


LIMITS = StepLimits(max_num_batched_tokens=8192, max_num_seqs=3)


def a_step(card: Card) -> ProfilingStep:
    return ProfilingStep(model=card.part("model", 2 * GIB), sampler=card.part("sampler", GIB))


def measured_on(card: Card) -> tuple[MemoryProfiler, MeasuredMemory]:
    """A profiler that has been through the profile: 16 GiB of weights, half a GiB taken by libraries."""
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: card.allocate(16 * GIB))
    card.context_bytes += GIB // 2
    return profiler, profiler.profile(a_step(card))


def profiled(card: Card) -> MemoryProfiler:
    return measured_on(card)[0]


def bytes_of(rows: tuple) -> dict[str, int]:
    return {row.name: row.num_bytes for row in rows}


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_libraries_are_warm_before_the_baseline_is_read() -> None:
    card = Card()
    baseline = MemoryProfiler(card, LIMITS).take_baseline()
    assert card.calls == ["warm_up", "release_cached", "read"]
    assert baseline.torch_allocated_bytes == 32 * MIB
    assert baseline.free_bytes == 80 * GIB - 10 * GIB - GIB // 2 - 72 * MIB


def test_a_step_runs_every_part_in_a_servers_order_with_a_fresh_peak_each() -> None:
    card = Card()
    profiler = MemoryProfiler(card, attrs.evolve(LIMITS, num_speculative_tokens=4))
    profiler.take_baseline()
    profiler.load_weights(lambda: None)
    card.calls.clear()
    profiler.profile(
        ProfilingStep(
            encoder=card.part("encoder", GIB),
            model=card.part("model", GIB),
            sampler=card.part("sampler", GIB),
            rejection_sampler=card.part("rejection sampler", GIB),
        )
    )
    scoped = f"set {SETTINGS},max_split_size_mb:20"
    assert card.calls == [
        scoped,
        "inference mode",
        *("reset_peak", "encoder()", "read"),
        *("reset_peak", "model((2730, 2730, 2732),)", "read"),
        *("reset_peak", "sampler('output of model',)", "read"),
        *("reset_peak", "rejection sampler('output of model', 4)", "read"),
        "end of inference mode",
        f"set {SETTINGS}",
        *("release_cached", "read"),
    ]


@pytest.mark.parametrize("max_num_seqs", [1, 7, 256, 10_000])
def test_the_models_tokens_add_up_to_the_largest_batch(max_num_seqs: int) -> None:
    limits = StepLimits(max_num_batched_tokens=8192, max_num_seqs=max_num_seqs)
    assert sum(limits.tokens_per_request) == 8192
    assert len(limits.tokens_per_request) == min(max_num_seqs, 8192)


def test_stages_go_in_order_each_once() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    with pytest.raises(MisuseError, match="stage loaded follows baseline, and this profiler is at new"):
        profiler.load_weights(lambda: None)
    with pytest.raises(MisuseError, match="follows pool or graphs"):
        profiler.reconcile()
    profiler.take_baseline()
    with pytest.raises(MisuseError, match="stage baseline follows new"):
        profiler.take_baseline()
    with pytest.raises(MisuseError, match="stage profiled follows loaded"):
        profiler.profile(a_step(card))
    profiler.load_weights(lambda: None)
    with pytest.raises(MisuseError, match="stage pool follows profiled"):
        profiler.allocate_pool(lambda: None, planned_bytes=1)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_splits_are_small_while_weights_load_and_the_settings_come_back() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    assert profiler.load_weights(lambda: card.settings) == f"{SETTINGS},max_split_size_mb:20"
    assert card.settings == SETTINGS


def test_settings_and_stage_survive_a_load_that_fails() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()

    def fail() -> None:
        raise RuntimeError("no such checkpoint")

    with pytest.raises(RuntimeError, match="no such checkpoint"):
        profiler.load_weights(fail)
    assert card.settings == SETTINGS
    assert profiler.load_weights(lambda: "second try") == "second try"


@pytest.mark.parametrize("part", ["encoder", "model", "sampler"])
def test_settings_come_back_when_a_part_of_the_step_fails(part: str) -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: None)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    step = ProfilingStep(encoder=lambda: None, model=lambda _: None, sampler=lambda _: None)
    with pytest.raises(RuntimeError, match="out of memory"):
        profiler.profile(attrs.evolve(step, **{part: fail}))
    assert card.settings == SETTINGS
    profiler.profile(step)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_every_row_of_an_attributed_profile_is_measured_and_ties_out() -> None:
    card = Card()
    profiler = profiled(card)
    measured = profiler.estimate_graphs((graphs(card),), num_captured_sizes=None)
    assert bytes_of(measured.rows) == {
        "weights": 16 * GIB,
        "non-torch": GIB // 2,
        "peak activation": 2 * GIB,
        "CUDA graphs": (100 + 4 + 4 + 4) * MIB,
    }
    assert {row.source for row in measured.rows} == {RowSource.MEASURED}


def test_the_rows_fill_a_ledger_that_adds_up_to_the_device() -> None:
    _, measured = measured_on(Card())
    before = measured.profile.before
    budget = MemoryBudget(total_bytes=before.total_bytes, free_bytes=before.free_bytes, fraction=0.5)
    ledger = MemoryLedger(budget=budget, non_kv_rows=measured.rows)
    assert ledger.available_bytes == 40 * GIB - sum_bytes(measured.rows)
    assert sum_bytes(ledger.rows(pool_bytes=20 * GIB)) == 80 * GIB


def test_the_peak_is_the_highest_parts_and_the_row_names_them_all() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: card.allocate(16 * GIB))
    measured = profiler.profile(
        ProfilingStep(model=card.part("model", GIB, kept_bytes=MIB), sampler=card.part("sampler", 3 * GIB))
    )
    warm = 32 * MIB
    assert [(part.name, part.peak_bytes) for part in measured.peaks] == [
        ("model", 17 * GIB + MIB + warm),
        ("sampler", 19 * GIB + MIB + warm),
    ]
    assert bytes_of(measured.rows)["peak activation"] == 3 * GIB
    assert bytes_of(measured.rows)["sampler and workspace"] == MIB
    formula = next(row.formula for row in measured.rows if row.name == "peak activation")
    assert f"peaks: model {17 * GIB + MIB + warm:,}; sampler {19 * GIB + MIB + warm:,}" in formula


def test_what_the_encoder_adds_to_the_peak_is_a_row_of_its_own() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: None)
    measured = profiler.profile(
        ProfilingStep(
            encoder=card.part("encoder", 5 * GIB), model=card.part("model", 2 * GIB), pooler=card.part("pooler", GIB)
        )
    )
    assert bytes_of(measured.rows)["peak activation"] == 2 * GIB
    assert bytes_of(measured.rows)["encoder"] == 3 * GIB
    assert measured.profile.transient_headroom_bytes == 5 * GIB


@pytest.mark.parametrize("neighbour_gib", [0, -5, 5, -20])
def test_a_neighbour_neither_pays_nor_gains_where_memory_is_attributed(neighbour_gib: int) -> None:
    # Field report A12.
    card = Card(others_bytes=30 * GIB)
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: card.allocate(16 * GIB))
    card.others_bytes += neighbour_gib * GIB
    measured = profiler.profile(a_step(card))
    assert sum_bytes(measured.rows) == 18 * GIB
    assert any("during profiling by other processes" in text for text in measured.warnings) == bool(neighbour_gib)


def test_without_attribution_the_rows_that_rest_on_it_are_estimates_and_say_so() -> None:
    card = Card(attributes_process=False)
    _, measured = measured_on(card)
    sources = {row.name: row.source for row in measured.rows}
    assert sources["weights"] is sources["peak activation"] is RowSource.MEASURED
    assert sources["non-torch"] is RowSource.ESTIMATE
    assert "does not attribute" in measured.warnings[0]


def test_strict_profiling_takes_free_memory_that_grew_for_an_error() -> None:
    card = Card(others_bytes=30 * GIB)
    profiler = MemoryProfiler(card, LIMITS, strict_profiling=True)
    profiler.take_baseline()
    profiler.load_weights(lambda: card.allocate(GIB))
    card.others_bytes -= 20 * GIB
    with pytest.raises(MemoryShortfallError) as refused:
        profiler.profile(a_step(card))
    assert refused.value.condition is MemoryCondition.FREE_GREW_DURING_PROFILING


def test_unified_memory_counts_what_the_host_can_give_up_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "free_and_total_bytes", lambda self: (50 * GIB, 80 * GIB))
    by_driver = Card(kind=MemoryKind.UNIFIED, overridden={"free": 60 * GIB})
    assert DeviceProbe(by_driver).read().free_bytes == 60 * GIB
    with_page_cache = Card(kind=MemoryKind.UNIFIED, overridden={"free": 3 * GIB})
    assert DeviceProbe(with_page_cache).read().free_bytes == 50 * GIB
    own_memory = Card(overridden={"free": 3 * GIB})
    assert DeviceProbe(own_memory).read().free_bytes == 3 * GIB


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overridden", "message"),
    [
        ({"free": -1}, r"free -1 B.*between 0 and the total"),
        ({"free": 81 * GIB}, r"free 86,973,087,744 B.*between 0 and the total"),
        ({"process": 81 * GIB}, r"this process 86,973,087,744 B.*attribute_process=False"),
        ({"process": 5}, r"this process 5 B.*another process of the same id"),
        ({"allocated_bytes": -3}, r"torch allocated -3 B.*below 0"),
        ({"peak_bytes": 1}, r"torch peak 1 B.*peak is below"),
        ({"reserved_bytes": 1}, r"torch reserved 1 B.*between what it allocated and the total"),
        ({"allocated_bytes": None}, r"torch allocated -.*did not count"),
    ],
)
def test_readings_that_cannot_be_true_are_refused_with_the_numbers(overridden: dict, message: str) -> None:
    card = Card(overridden=overridden)
    card.allocate(GIB)
    with pytest.raises(InputError, match=message):
        DeviceProbe(card).read()


def test_a_pluggable_allocator_need_not_count() -> None:
    card = Card(
        has_native_allocator=False, overridden={"allocated_bytes": None, "peak_bytes": None, "reserved_bytes": -7}
    )
    reading = DeviceProbe(card).read()
    assert (reading.torch_allocated_bytes, reading.torch_peak_bytes, reading.torch_reserved_bytes) == (0, 0, -7)


def test_a_process_id_that_means_somebody_else_can_be_left_out() -> None:
    card = Card(overridden={"process": 5})
    card.allocate(GIB)
    assert DeviceProbe(card, attribute_process=False).read().process_bytes is None


def test_weights_that_shrink_live_tensors_are_refused_with_both_figures() -> None:
    card = Card()
    card.allocate(GIB)
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    with pytest.raises(InputError, match=r"from 1,107,296,256 to 33,554,432 bytes"):
        profiler.load_weights(lambda: card.free(GIB))


@pytest.mark.parametrize(
    ("parts", "drafts", "message"),
    [
        ({}, 0, "neither was given"),
        ({"sampler": id, "pooler": id}, 0, "both were given"),
        ({"sampler": id}, 3, "3 draft tokens a request .* no rejection_sampler"),
        ({"sampler": id, "rejection_sampler": divmod}, 0, "would never run"),
        ({"pooler": id, "rejection_sampler": divmod}, 2, "a pooling model drafts nothing"),
        ({"sampler": id, "is_last_rank": False}, 0, "sampler: given for a pipeline rank that is not the last"),
    ],
)
def test_a_step_that_lacks_a_part_or_has_one_too_many_is_refused(parts: dict, drafts: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProfilingStep(model=id, **parts).check(attrs.evolve(LIMITS, num_speculative_tokens=drafts))


def test_a_pipeline_rank_that_is_not_the_last_runs_the_model_alone() -> None:
    card = Card()
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: None)
    measured = profiler.profile(ProfilingStep(model=card.part("model", GIB), is_last_rank=False))
    assert [part.name for part in measured.peaks] == ["model"]


# -- graphs, pool, reconciliation --------------------------------------------------------------------------------------


def graphs(card: Card, sizes: tuple[int, ...] = (1, 2, 4, 8), shared: int = 96 * MIB) -> GraphCaptures:
    """The first graph holds what all share; each takes 4 MiB of its own."""
    captured: list[int] = []

    class Graph:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes
            card.context_bytes += num_bytes

        def __del__(self) -> None:
            card.context_bytes -= self.num_bytes

    def capture(size: int) -> Graph:
        card.calls.append(f"capture {size}")
        captured.append(size)
        return Graph(4 * MIB + (shared if len(captured) == 1 else 0))

    return GraphCaptures(mode="full", sizes=sizes, capture=capture)


def test_graphs_are_sampled_largest_first_over_the_smallest_pool_and_let_go() -> None:
    card = Card()
    profiler = profiled(card)
    held = card.context_bytes
    card.calls.clear()

    @contextmanager
    def smallest_pool() -> Any:
        card.calls.append("smallest pool")
        card.allocate(GIB)
        yield
        card.calls.append("end of smallest pool")
        card.free(GIB)

    measured = profiler.estimate_graphs((graphs(card),), smallest_pool=smallest_pool)
    assert [call for call in card.calls if call not in ("read", "release_cached")] == [
        *("inference mode", "smallest pool", "capture 8", "capture 4", "end of smallest pool", "end of inference mode")
    ]
    assert card.context_bytes == held
    row = measured.rows[-1]
    assert (row.name, row.source) == ("CUDA graphs", RowSource.ESTIMATE)
    assert row.num_bytes == (100 + 4 + 2 * 4) * MIB
    assert (row.low_bytes, row.high_bytes) == (104 * MIB, 112 * MIB)
    assert "2 more (full) x 4,194,304" in row.formula


def test_a_graph_that_shows_no_memory_still_takes_a_share() -> None:
    card = Card()
    profiler = profiled(card)
    measured = profiler.estimate_graphs((GraphCaptures(mode="full", sizes=(1, 2, 3), capture=lambda _: None),))
    assert measured.graph_bytes == MIB


def test_two_modes_are_captured_one_after_the_other_and_added() -> None:
    card = Card()
    profiler = profiled(card)
    second = attrs.evolve(graphs(card, sizes=(16, 32), shared=8 * MIB), mode="piecewise")
    measured = profiler.estimate_graphs((graphs(card), second))
    assert measured.graphs is not None
    assert [(s.mode, s.size, s.num_bytes // MIB) for s in measured.graphs.samples] == [
        ("full", 8, 100),
        ("full", 4, 4),
        ("piecewise", 32, 12),
        ("piecewise", 16, 4),
    ]
    assert measured.graph_bytes == (100 + 4 + 8 + 12 + 4) * MIB


def test_memory_that_sampled_graphs_do_not_give_back_is_a_warning_with_its_bytes() -> None:
    card = Card()
    profiler = profiled(card)

    def leak(_: int) -> None:
        card.context_bytes += 3 * MIB

    measured = profiler.estimate_graphs((GraphCaptures(mode="full", sizes=(1, 2), capture=leak),))
    assert measured.warnings == ("6.00 MiB (6,291,456 B) stayed taken after the sampled graphs were dropped",)


@pytest.mark.parametrize(("modes", "count"), [((), 2), ("some", 1)])
def test_an_estimate_of_nothing_or_from_one_graph_is_refused(modes: Any, count: int) -> None:
    card = Card()
    profiler = profiled(card)
    given = (graphs(card),) if modes else ()
    with pytest.raises(InputError, match=r"no graphs|num_captured_sizes is 1"):
        profiler.estimate_graphs(given, num_captured_sizes=count)


def test_start_up_reconciles_to_the_byte_and_every_row_is_measured() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.estimate_graphs((graphs(card),))
    assert profiler.allocate_pool(lambda: card.allocate(20 * GIB) or "pool", planned_bytes=20 * GIB) == "pool"
    mode = graphs(card)
    kept = profiler.capture_graphs(lambda: [mode.capture(size) for size in mode.sizes])
    report = profiler.reconcile()
    assert {row.source for row in report.rows} == {RowSource.MEASURED}
    assert bytes_of(report.rows)["CUDA graphs"] == 112 * MIB
    assert bytes_of(report.rows)["KV cache blocks"] == 20 * GIB
    assert report.actual_bytes == report.expected_bytes == (16 + 20) * GIB + GIB // 2 + 112 * MIB
    assert report.warnings == ()
    assert len(kept) == 4


def test_what_differs_from_the_plan_is_named_with_its_bytes() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.estimate_graphs((graphs(card),))
    profiler.allocate_pool(lambda: card.allocate(20 * GIB), planned_bytes=20 * GIB)
    mode = graphs(card, shared=196 * MIB)
    kept = profiler.capture_graphs(lambda: [mode.capture(size) for size in mode.sizes])
    card.context_bytes += 64 * MIB
    report = profiler.reconcile()
    assert len(kept) == 4
    assert report.unexplained_bytes == 64 * MIB
    graphs_warning, unexplained_warning = report.warnings
    assert "(104,857,600 B) more than the 0.11 GiB (117,440,512 B) set aside" in graphs_warning
    assert "(67,108,864 B) more than the rows explain" in unexplained_warning


def test_an_engine_without_graphs_reconciles_too() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.allocate_pool(lambda: card.allocate(GIB), planned_bytes=GIB)
    report = profiler.reconcile()
    assert "CUDA graphs" not in bytes_of(report.rows)
    assert report.warnings == ()


def test_a_pool_smaller_than_planned_is_refused_with_both_figures() -> None:
    card = Card()
    profiler = profiled(card)
    with pytest.raises(InputError, match=r"planned at 20.00 GiB .* grew by 19.00 GiB"):
        profiler.allocate_pool(lambda: card.allocate(19 * GIB), planned_bytes=20 * GIB)
