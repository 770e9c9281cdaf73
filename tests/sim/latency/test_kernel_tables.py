"""Curves and surfaces of measured times, and the tables of a kernel database."""

from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.kernel_tables import Curve, KernelTables, Surface, has_kernel_tables

from tests.sim.kernel_database import all_reduce_ms, experts_ms, gemm_ms, gemm_rows, generation_ms, write_table


@pytest.fixture
def tables(kernel_database: Path) -> KernelTables:
    return KernelTables.of(find_device("H200"))


def test_a_curve_is_linear_between_points_constant_below_and_on_the_last_slope_above() -> None:
    curve = Curve.of({10: 1.0, 20: 3.0, 40: 5.0})
    assert [curve.at(count) for count in (1, 10, 15, 30, 40, 60)] == [1, 1, 2, 4, 5, 7]
    assert Curve.of({4: 2.0}).at(100) == 2


def test_a_cleaned_curve_never_falls_and_lies_nowhere_above_a_point() -> None:
    points = {1: 5.0, 2: 2.0, 4: 3.0, 8: 2.5, 16: 4.0}
    curve = Curve.of(points)
    assert curve.seconds == (2.0, 2.0, 2.5, 2.5, 4.0)
    assert Curve.through(points).seconds == tuple(points.values())


def test_curves_add_at_the_counts_of_both_and_scale() -> None:
    one, other = Curve.of({1: 1.0, 3: 3.0}), Curve.of({2: 4.0, 4: 4.0})
    assert (one + other).counts == (1, 2, 3, 4)
    assert (one + other).at(2) == 6
    assert (one * 2).at(2) == 4


def test_a_surface_is_linear_in_both_counts() -> None:
    surface = Surface.of({(1, 0): 1.0, (1, 10): 2.0, (3, 0): 3.0, (3, 10): 6.0})
    assert surface.at(2, 5) == pytest.approx((1.5 + 4.5) / 2)
    assert surface.at(0, 5) == 1.5  # below the first value
    assert surface.at(4, 5) == pytest.approx(4.5 + 1.5)  # above the last


def test_a_gemm_is_found_by_shape_and_interpolated_between_shapes(tables: KernelTables) -> None:
    curve = tables.gemm("bfloat16", 4096, 1024)
    assert curve is not None
    assert curve.at(256) == pytest.approx(gemm_ms(256, 4096, 1024) / 1e3)
    between = tables.gemm("bfloat16", 3072, 1024)
    assert between is not None
    expected = (gemm_ms(256, 2048, 1024) + gemm_ms(256, 4096, 1024)) / 2e3
    assert between.at(256) == pytest.approx(expected)


def test_the_newest_version_that_has_a_dtype_wins(tables: KernelTables) -> None:
    newest, only = tables.gemm("bfloat16", 1024, 1024), tables.gemm("fp8", 1024, 1024)
    assert newest is not None
    assert only is not None
    assert newest.at(1) == pytest.approx(gemm_ms(1, 1024, 1024) / 1e3)
    assert only.at(1) == pytest.approx(3 * newest.at(1))  # 0.9.0 is older than 0.24.0, and alone has fp8


def test_what_was_not_measured_is_none(tables: KernelTables) -> None:
    assert tables.gemm("nvfp4", 1024, 1024) is None
    assert tables.attention("context", 31, 8, 128, "bfloat16", 0) is None
    assert tables.attention("generation", 64, 8, 64, "bfloat16", 4096) is None
    assert tables.latent_attention("context", 128, "bfloat16", "bfloat16") is None
    assert tables.experts("fp8", 2880, 2880, 4, 32, (1, 1)) is None
    assert tables.all_reduce(4) is None


def test_a_gemm_beyond_the_largest_measured_ones_is_none_not_a_number_without_a_value(
    tmp_path: Path, kernel_database: Path
) -> None:
    rows = [row for row in gemm_rows() if (row["n"], row["k"]) != (65536, 65536)]
    write_table(tmp_path, "gemm", "gemm_perf", rows)
    tables = KernelTables("h200_sxm", tmp_path / "aiconfigurator_core" / "systems" / "data")
    assert tables.gemm("bfloat16", 50_000, 50_000) is None
    assert tables.gemm("bfloat16", 16_384, 16_384) is not None


def test_few_gemms_of_one_model_do_not_stand_for_all_shapes(tmp_path: Path, kernel_database: Path) -> None:
    write_table(tmp_path, "gemm", "gemm_perf", gemm_rows()[:900])
    tables = KernelTables("h200_sxm", tmp_path / "aiconfigurator_core" / "systems" / "data")
    assert tables.gemm("bfloat16", 64, 512) is None


def test_attention_has_a_surface_over_sequences_and_cached_tokens(tables: KernelTables) -> None:
    surface = tables.attention("generation", 32, 8, 128, "bfloat16", 0)
    assert surface is not None
    assert surface.at(64, 1024) == pytest.approx(generation_ms(64, 1024) / 1e3)


def test_experts_of_other_ranks_stand_in_for_ranks_that_were_not_measured(tables: KernelTables) -> None:
    exact = tables.experts("w4a16_mxfp4", 2880, 2880, 4, 32, (1, 2))
    nearest = tables.experts("w4a16_mxfp4", 2880, 2880, 4, 32, (8, 1))
    assert exact is not None
    assert nearest is not None
    assert exact[1] == nearest[1] == (1, 2)
    assert exact[0].at(1024) == pytest.approx(experts_ms(1024) / 2e3)


def test_an_all_reduce_is_the_one_inside_a_graph(tables: KernelTables) -> None:
    curve = tables.all_reduce(2)
    assert curve is not None
    assert curve.at(1 << 20) == pytest.approx(all_reduce_ms(1 << 20) / 1e3)


def test_a_device_without_tables_or_a_missing_database_is_named(kernel_database: Path) -> None:
    assert has_kernel_tables(find_device("H200"))
    assert not has_kernel_tables(find_device("L4"))
    with pytest.raises(InputError, match="no kernel times of the L4 here"):
        KernelTables.of(find_device("L4"))


def test_without_the_database_the_error_says_how_to_install_it(no_kernel_database: None) -> None:
    assert not has_kernel_tables(find_device("H200"))
    with pytest.raises(InputError, match=r"pip install 'kvledger\[kernels-db\]'"):
        KernelTables.of(find_device("H200"))
