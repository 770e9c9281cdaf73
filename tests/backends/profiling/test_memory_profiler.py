"""The profiler against a device whose memory is arithmetic: order, settings, figures and refusals."""

import attrs
import pytest
from kvledger.backends.profiling.probe import DeviceProbe, HostDevice
from kvledger.backends.profiling.profiler import MemoryProfiler
from kvledger.backends.profiling.step import ProfilingStep, StepLimits
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.memory.budget import MemoryCondition, MemoryShortfallError
from kvledger.core.memory.ledger import MemoryBudget, MemoryLedger, RowSource, sum_bytes
from kvledger.core.memory.profile import MemoryKind

from tests.backends.profiling.arithmetic_card import (
    GIB,
    LIMITS,
    MIB,
    SETTINGS,
    Card,
    a_step,
    bytes_of,
    graphs,
    measured_on,
    profiled,
)

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
