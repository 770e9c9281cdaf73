"""D07: TTFT, ITL, TPOT and E2E as the field defines them."""

import pytest


def test_d07_ttft_itl_tpot_and_e2e_of_tokens_at_05_06_and_08(simulated) -> None:
    report = simulated((0.0, 10, 3), step_seconds=(0.5, 0.1, 0.2), macro_steps=False)
    assert report["ttft_s"]["mean"] == 0.5
    assert report["itl_s"]["count"] == 2
    assert report["itl_s"]["mean"] == pytest.approx(0.15)
    assert report["itl_s"]["max"] == 0.2
    assert report["tpot_s"]["mean"] == pytest.approx(0.15)
    assert report["e2e_s"]["mean"] == 0.8


def test_d07_a_single_token_has_no_tpot_and_no_itl(simulated) -> None:
    report = simulated((0.0, 10, 1))
    assert report["tpot_s"] == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None, "count": 0}
    assert report["itl_s"]["count"] == 0
    assert report["e2e_s"]["mean"] == report["ttft_s"]["mean"] == 0.1


def test_d07_means_are_over_requests_for_tpot_and_over_gaps_for_itl(simulated) -> None:
    # tokens at 0.5, 0.6, 0.8 and, on a request of its own time, at 1.0, 1.1, 1.2, 1.3, 1.4
    report = simulated((0.0, 10, 3), (0.85, 10, 5), step_seconds=(0.5, 0.1, 0.2, 0.15, 0.1, 0.1, 0.1, 0.1))
    assert report["tpot_s"]["mean"] == pytest.approx(0.125)
    assert report["itl_s"]["mean"] == pytest.approx(0.7 / 6)
    assert report["itl_s"]["count"] == 6


def test_d07_a_preemption_is_one_long_gap_and_ttft_is_not_reset(simulated) -> None:
    report = simulated((0.0, 40, 60), (0.0, 40, 60), num_blocks=8)
    assert report["preemptions"]["total"] >= 1
    assert report["ttft_s"]["count"] == 2
    assert report["ttft_s"]["max"] == 0.1
    assert report["itl_s"]["count"] == 2 * 59
    assert report["itl_s"]["max"] > 0.1 + 1e-9
