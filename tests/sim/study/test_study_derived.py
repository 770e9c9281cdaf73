"""What follows from the parts of a study: the mean request, and whether the engine keeps up."""

import pytest
from kvledger.sim.study.answer import derived_figures


@pytest.mark.parametrize(("waiting", "falls_behind"), [(10, False), (11, True), (500, True)])
def test_an_engine_falls_behind_where_more_than_a_percent_still_waits_at_the_last_arrival(
    waiting: int, falls_behind: bool
) -> None:
    replay = {
        "last_arrival_s": 10.0,
        "series": {"time_s": [0.0, 9.9, 10.1, 30.0], "num_requests_waiting": [0, waiting, 900, 0]},
        "requests": {"total": 1000},
        "simulated_seconds": 31.0,
    }
    derived = derived_figures({"replay": replay}, None)
    assert derived["seconds_after_last_arrival"] == 21.0
    assert (derived["waiting_at_last_arrival"], derived["most_waiting"]) == (waiting, 900)
    assert derived["falls_behind"] is falls_behind


def test_the_mean_request_is_rounded_up_and_nothing_follows_from_what_is_not_there() -> None:
    trace = {"num_requests": 3, "num_requests_without_hash_ids": 3, "input_tokens": 90, "output_tokens": 11}
    derived = derived_figures({"curve": {"trace": trace}}, None)
    assert derived == {"pool_pinned_by": None, "claims_reuse": False, "mean_request_tokens": 34}
