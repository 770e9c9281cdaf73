import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import builtin_geometry
from kvledger.core.types import StepLoad
from kvledger.sim.latency.calibration import (
    FITTED_FACTORS,
    MeasuredStep,
    fit_factors,
    leave_one_out,
    mean_absolute_percentage_error,
)
from kvledger.sim.latency.devices import DeviceFactors, find_device
from kvledger.sim.latency.roofline import RooflineLatency

SERVERS = (("llama-2-7b", 1), ("qwen2.5-7b", 1), ("mistral-nemo-12b", 2), ("llama-3.1-70b", 4), ("mixtral-8x7b", 2))


def _latency(name: str, ranks: int, device: str = "H100") -> RooflineLatency:
    return RooflineLatency.for_model(
        builtin_geometry(name), find_device(device), tensor_parallel_size=ranks, max_num_seqs=128
    )


def _steps(truth: DeviceFactors, *, error: float = 0.0) -> list[MeasuredStep]:
    """What servers with these factors would take, the signs of a relative error alternating."""
    steps: list[MeasuredStep] = []
    for name, ranks in SERVERS:
        latency = attrs.evolve(_latency(name, ranks), factors=truth)
        for num_seqs, context in ((1, 500), (16, 500), (64, 500), (64, 4_000)):
            load = StepLoad(0, num_seqs, 0, num_seqs * context, num_seqs)
            sign = 1 - 2 * (len(steps) % 2)
            seconds = latency.step_seconds(load) * (1 + sign * error)
            steps.append(MeasuredStep(latency=latency, load=load, seconds=seconds, label=name))
    return steps


def _truth() -> DeviceFactors:
    return attrs.evolve(
        DeviceFactors(),
        weights_bandwidth_efficiency=0.75,
        kv_bandwidth_efficiency=0.7,
        layer_s=50e-6,
        expert_layer_s=80e-6,
        all_reduce_s=5e-6,
        step_s=0.6e-3,
        sampler_s_per_logit=0.2e-9,
    )


def test_a_fit_finds_the_factors_behind_exact_measurements():
    fitted = fit_factors(_steps(_truth()), start=DeviceFactors(), measurement_error=1e-4)
    assert fitted.mape < 0.01 < 5 < fitted.mape_before
    for name in FITTED_FACTORS:
        assert getattr(fitted.factors, name) == pytest.approx(getattr(_truth(), name), rel=0.03), name


def test_a_fit_of_noisy_measurements_errs_about_as_much_as_they_do():
    fitted = fit_factors(_steps(_truth(), error=0.02), start=DeviceFactors())
    assert 1.0 < fitted.mape < 2.5
    assert fitted.to_json()["mape_pct"] == fitted.mape
    assert [step["label"] for step in fitted.to_json()["steps"]] == list(fitted.labels)
    assert fitted.mape == pytest.approx(mean_absolute_percentage_error(fitted.errors_after))


def test_a_single_step_moves_the_factors_a_little_and_most_of_its_error_away():
    step = _steps(_truth())[2]
    fitted = fit_factors([step], start=DeviceFactors())
    assert abs(fitted.errors_after[0]) < abs(fitted.errors_before[0]) / 5
    for name in FITTED_FACTORS:
        moved = getattr(fitted.factors, name) / getattr(DeviceFactors(), name)
        assert 0.5 < moved < 2, name


def test_factors_that_the_steps_do_not_tell_stay_where_they_started():
    dense_on_one_gpu = _steps(_truth())[:4]
    fitted = fit_factors(dense_on_one_gpu, start=DeviceFactors())
    assert fitted.factors.all_reduce_s == pytest.approx(DeviceFactors().all_reduce_s)
    assert fitted.factors.expert_layer_s == pytest.approx(DeviceFactors().expert_layer_s)


def test_only_the_free_factors_move_and_long_prompts_tell_the_compute_efficiency():
    truth = attrs.evolve(DeviceFactors(), compute_efficiency=0.5)
    latency = attrs.evolve(_latency("llama-2-7b", 1), factors=truth)
    load = StepLoad(8_192, 0, 8_192 * 4_096, 0, 1)
    step = MeasuredStep(latency=latency, load=load, seconds=latency.step_seconds(load), label="prompt")
    fitted = fit_factors([step], start=DeviceFactors(), free=["compute_efficiency"], measurement_error=1e-4)
    assert fitted.factors.compute_efficiency == pytest.approx(0.5, rel=1e-3)
    assert attrs.evolve(fitted.factors, compute_efficiency=0.65, source="") == attrs.evolve(DeviceFactors(), source="")


def test_fitted_efficiencies_stay_below_one():
    steps = [attrs.evolve(step, seconds=step.seconds / 3) for step in _steps(_truth())]
    fitted = fit_factors(steps, start=DeviceFactors(), measurement_error=1e-3, spread=3.0)
    assert 0.85 < fitted.factors.weights_bandwidth_efficiency <= 1


def test_the_source_of_fitted_factors_names_the_measurements_and_the_start():
    fitted = fit_factors(_steps(_truth())[:5], start=DeviceFactors())
    assert "fitted to 5 measured steps (llama-2-7b, qwen2.5-7b)" in fitted.factors.source
    assert DeviceFactors().source in fitted.factors.source


def test_leaving_one_label_out_fits_the_others_and_predicts_it():
    steps = _steps(_truth())
    results = list(leave_one_out(steps, lambda rest: fit_factors(rest, start=DeviceFactors())))
    assert [label for label, _, _ in results] == [name for name, _ in SERVERS]
    for label, factors, errors in results:
        assert len(errors) == 4
        assert label not in factors.source
        assert max(abs(error) for error in errors) < 0.1, label


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": []}, "at least one measured step"),
        ({"free": ["speed"]}, "cannot fit speed; factors are compute_efficiency"),
        ({"free": []}, "no factor at all"),
        ({"measurement_error": 0.0}, "measurement_error is 0.0"),
        ({"spread": float("inf")}, "spread is inf"),
        ({"start": attrs.evolve(DeviceFactors(), layer_s=0.0)}, "factor layer_s starts at 0.0"),
    ],
)
def test_a_fit_that_cannot_work_is_refused_with_the_reason(options: dict, message: str):
    arguments = {"steps": _steps(_truth())[:2], "start": DeviceFactors(), **options}
    with pytest.raises(InputError, match=message):
        fit_factors(arguments.pop("steps"), **arguments)


def test_steps_of_two_gpu_types_are_refused():
    step = _steps(_truth())[0]
    other = attrs.evolve(step, latency=_latency("llama-2-7b", 1, "A100-80GB"))
    with pytest.raises(InputError, match="A100-80GB, H100; fit the factors of one GPU type at a time"):
        fit_factors([step, other], start=DeviceFactors())


def test_a_measured_step_that_takes_no_time_is_refused():
    with pytest.raises(InputError, match="measured step 'llama-2-7b': 0 s"):
        attrs.evolve(_steps(_truth())[0], seconds=0)
