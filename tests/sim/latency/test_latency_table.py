from pathlib import Path

import pytest
from kvledger.core.errors import DoesNotFitError, InputError
from kvledger.core.types import StepLoad
from kvledger.sim.latency.table import TableLatency

TABLE = """num_prefill_tokens,num_decode_tokens,decode_context_tokens,step_ms
0,8,100,6
0,8,1000,7
0,32,100,8
0,32,1000,12
512,0,0,20
512,8,100,26
512,8,1000,27
512,32,100,28
512,32,1000,32
0,0,0,1
"""


def _table(tmp_path: Path, text: str, *, extrapolate: bool = False) -> TableLatency:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    return TableLatency.from_csv(path, extrapolate=extrapolate)


def _decode(num_seqs: int, context: int) -> StepLoad:
    return StepLoad(0, num_seqs, 0, num_seqs * context, num_seqs)


def _ms(table: TableLatency, load: StepLoad) -> float:
    return table.step_seconds(load) * 1e3


def test_a_measured_step_is_returned_as_measured(tmp_path: Path):
    table = _table(tmp_path, TABLE)
    assert _ms(table, _decode(8, 100)) == pytest.approx(6)
    assert _ms(table, _decode(32, 1000)) == pytest.approx(12)
    assert _ms(table, StepLoad(512, 32, 512 * 300, 32 * 1000, 33)) == pytest.approx(32)


def test_between_measured_values_a_step_is_interpolated_along_every_axis(tmp_path: Path):
    table = _table(tmp_path, TABLE)
    assert _ms(table, _decode(20, 100)) == pytest.approx(7)
    assert _ms(table, _decode(20, 550)) == pytest.approx((6 + 7 + 8 + 12) / 4)
    assert _ms(table, StepLoad(256, 20, 0, 20 * 550, 20)) == pytest.approx((6 + 7 + 8 + 12 + 26 + 27 + 28 + 32) / 8)


def test_where_nothing_decodes_the_context_does_not_matter_and_one_row_serves_all(tmp_path: Path):
    table = _table(tmp_path, TABLE)
    assert _ms(table, StepLoad(512, 0, 512 * 5_000, 0, 1)) == pytest.approx(20)


def test_axes_that_the_header_leaves_out_do_not_matter_and_are_named(tmp_path: Path):
    table = _table(tmp_path, "num_decode_tokens,step_ms\n1,5\n64,9\n")
    assert table.step_seconds(_decode(64, 10)) == table.step_seconds(_decode(64, 9_000))
    assert table.assumptions()["axes_without_effect"] == [
        "num_prefill_tokens",
        "prefill_context_tokens",
        "decode_context_tokens",
    ]


def test_rows_of_the_same_step_are_averaged(tmp_path: Path):
    table = _table(tmp_path, "num_decode_tokens,step_ms\n1,5\n64,9\n64,10\n")
    assert _ms(table, _decode(64, 10)) == pytest.approx(9.5)
    assert "3 measured steps" in table.assumptions()["source"]


def test_a_step_outside_the_table_is_refused_with_the_axis_and_its_range(tmp_path: Path):
    table = _table(tmp_path, TABLE)
    with pytest.raises(DoesNotFitError, match=r"num_decode_tokens 64, outside the table's 0 to 32.*extrapolation"):
        table.step_seconds(_decode(64, 100))
    with pytest.raises(DoesNotFitError, match=r"decode_context_tokens 50, outside the table's 100 to 1000"):
        table.step_seconds(_decode(8, 50))


def test_a_step_outside_the_table_is_extrapolated_when_asked(tmp_path: Path):
    table = _table(tmp_path, TABLE, extrapolate=True)
    assert _ms(table, _decode(56, 100)) == pytest.approx(10)
    assert table.assumptions()["outside_the_table"] == "extrapolated linearly"


def test_an_extrapolation_to_no_time_at_all_is_refused(tmp_path: Path):
    table = _table(tmp_path, "num_decode_tokens,step_ms\n8,10\n16,30\n", extrapolate=True)
    with pytest.raises(DoesNotFitError, match=r"takes -7\.5 ms"):
        table.step_seconds(_decode(1, 100))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"steps.csv:1: the header is empty"),
        ("num_decode_tokens\n1\n", r"steps.csv:1: .*expected step_ms"),
        ("num_decode_tokens,step_ms,batch\n1,2,3\n", r"steps.csv:1: the header is num_decode_tokens, step_ms, batch"),
        ("num_decode_tokens,num_decode_tokens,step_ms\n1,1,3\n", r"steps.csv:1: .*once each"),
        (
            "decode_context_tokens,step_ms\n1,2\n",
            r"steps.csv:1: the header lacks num_decode_tokens \(for decode_context_tokens\)",
        ),
        ("num_decode_tokens,step_ms\n", r"no rows under the header"),
        ("num_decode_tokens,step_ms\n1,5\n2\n", r"steps.csv:3: 1 cells under a header of 2"),
        ("num_decode_tokens,step_ms\n1,5\nmany,6\n", r"steps.csv:3: num_decode_tokens is 'many'"),
        ("num_decode_tokens,step_ms\n1,5\n2,0\n", r"steps.csv:3: step_ms is '0'; expected a number above 0"),
        ("num_decode_tokens,step_ms\n1,5\n-2,6\n", r"steps.csv:3: num_decode_tokens is '-2'"),
        ("num_decode_tokens,step_ms\n1,nan\n", r"steps.csv:2: step_ms is 'nan'"),
        (
            "num_prefill_tokens,num_decode_tokens,step_ms\n0,1,5\n0,2,6\n512,1,7\n",
            r"1 of 4 combinations .* are missing: num_prefill_tokens 512, num_decode_tokens 2; measure them",
        ),
    ],
)
def test_a_bad_table_is_refused_with_file_line_and_column(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=message):
        _table(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"absent\.csv: No such file"):
        TableLatency.from_csv(tmp_path / "absent.csv")
