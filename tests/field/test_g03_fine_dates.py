"""Field report G03: dates are read to every digit that they have, not to a hundredth of a second."""

import json

import pytest
from kvledger.sim.traces import open_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
# Azure writes up to six decimals and leaves zeros at the end out, so one file mixes lengths.
DATES = (
    "2024-05-10 00:00:00.001000+00:00",
    "2024-05-10 00:00:00.002000+00:00",
    "2024-05-10 00:00:00.009000+00:00",
    "2024-05-10 00:00:00.011+00:00",
    "2024-05-10 00:00:01+00:00",
)


def trace_file(tmp_path, *dates):
    path = tmp_path / "dates.csv"
    path.write_text("\n".join([HEADER, *(f"{date},100,5" for date in dates)]) + "\n")
    return path


def test_g03_arrivals_are_exact_to_the_millisecond(tmp_path):
    trace = open_trace(trace_file(tmp_path, *DATES))
    assert [request.arrival_s for request in trace] == [0, 0.001, 0.008, 0.010, 0.999]


@pytest.mark.parametrize(
    ("fraction", "expected_s"),
    [("1", 0.1), ("12", 0.12), ("123", 0.123), ("0001", 0.0001), ("1234567", 0.1234567), ("000000001", 1e-9)],
)
@pytest.mark.parametrize(("separator", "zone"), [(" ", ""), ("T", "Z"), (" ", "+00:00"), ("T", "+0000")])
def test_g03_every_number_of_decimals_and_every_zone_is_read(tmp_path, fraction, expected_s, separator, zone):
    dates = (f"2024-05-10{separator}00:00:00{zone}", f"2024-05-10{separator}00:00:00.{fraction}{zone}")
    first, second = open_trace(trace_file(tmp_path, *dates))
    assert (first.arrival_s, second.arrival_s) == (0, expected_s)


def test_g03_a_replay_lasts_as_long_as_the_dates(kvledger, tmp_path):
    code, out, err = kvledger(
        "replay", str(trace_file(tmp_path, *DATES)), "--num-gpu-blocks-override", "4000", "--json"
    )
    assert (code, err) == (0, "")
    trace = json.loads(out)["trace"]
    assert (trace["window"]["end_s"], trace["timestamp_unit"]) == (0.999, "wall-clock dates")
