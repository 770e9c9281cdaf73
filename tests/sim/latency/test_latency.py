import pytest
from kvledger.core.errors import InputError
from kvledger.core.types import StepLoad
from kvledger.sim.latency.linear import LinearLatency


def test_a_step_is_a_base_and_a_cost_per_prefill_token_and_per_decoding_sequence():
    latency = LinearLatency(base_s=0.005, prefill_token_s=25e-6, decode_seq_s=20e-6)
    assert latency.step_seconds(StepLoad(1_000, 50, 0, 0, 50)) == pytest.approx(0.005 + 0.025 + 0.001)


def test_contexts_do_not_matter_to_a_linear_step():
    latency = LinearLatency()
    assert latency.step_seconds(StepLoad(8, 4, 0, 0, 4)) == latency.step_seconds(StepLoad(8, 4, 9_999, 9_999, 4))


def test_the_assumptions_name_every_coefficient_with_its_unit_and_source():
    assumptions = LinearLatency(base_s=0.002, prefill_token_s=1e-6, decode_seq_s=3e-6).assumptions()
    assert assumptions["base_ms"] == pytest.approx(2)
    assert assumptions["us_per_prefill_token"] == pytest.approx(1)
    assert assumptions["us_per_decoding_sequence"] == pytest.approx(3)
    assert assumptions["coefficients_source"] == "given"
    assert "calibrated to no server" in LinearLatency().assumptions()["coefficients_source"]


@pytest.mark.parametrize("name", ["base_s", "prefill_token_s", "decode_seq_s"])
@pytest.mark.parametrize("value", [-1e-6, float("inf"), float("nan")])
def test_a_coefficient_that_is_no_duration_is_refused_by_name(name: str, value: float):
    with pytest.raises(InputError, match=name):
        LinearLatency(**{name: value})


def test_steps_that_would_take_no_time_are_refused():
    with pytest.raises(InputError, match="a step must take time"):
        LinearLatency(base_s=0, decode_seq_s=0)
