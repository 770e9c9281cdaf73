"""Measured servers, predicted from their configuration and workload: one test per row of measured_serving.jsonl.

The quick tests compare the mean decode step of each stage; the slow ones simulate every server's whole workload and
hold the errors over all of them to the goals of `bench.fidelity.served_run`.
"""

import functools
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.latency.calibration import FITTED_FACTORS, fit_factors, leave_one_out, mean_absolute_percentage_error
from kvledger.sim.latency.devices import DeviceFactors, device_factors, find_device

from bench.fidelity.measured_serving import MeasuredServer, read_measured_serving
from bench.fidelity.served_run import (
    ClientTerms,
    ComparedRun,
    mape_over_runs,
    measured_steps,
    missed_goals,
    simulate_server,
)
from tests.parity.golden import golden_dir

CALIBRATED_ON = Path(__file__).parents[1] / "golden" / "measured_serving.jsonl"


def _servers(path: Path) -> list[MeasuredServer]:
    return list(read_measured_serving(path)) if path.exists() else []


SERVERS = _servers(golden_dir() / "measured_serving.jsonl")
each_server = pytest.mark.parametrize(
    "server", [pytest.param(server, id=f"{server.name}-{server.model.rsplit('/', 1)[-1]}") for server in SERVERS]
)


@functools.cache
def _compared(place: int) -> ComparedRun | None:
    server = SERVERS[place]
    try:
        return ComparedRun.of(server, simulate_server(server, client=ClientTerms(), seed=0))
    except InputError:  # a model or a GPU that is not built in
        return None


@each_server
def test_the_mean_decode_step_of_a_measured_server_is_within_15_percent(server: MeasuredServer):
    try:
        steps = measured_steps(server)
    except InputError as error:
        pytest.skip(str(error))
    errors = [step.relative_error(device_factors(find_device(server.gpu))) for step in steps]
    assert max(abs(error) for error in errors) < 0.15, errors


def _calibration_steps():
    return [step for server in _servers(CALIBRATED_ON) for step in measured_steps(server)]


@pytest.mark.skipif(not CALIBRATED_ON.exists(), reason="the servers that the factors were fitted to are not here")
def test_refitting_the_measured_servers_gives_the_h100_preset():
    fitted = fit_factors(_calibration_steps(), start=DeviceFactors())
    preset = device_factors(find_device("H100"))
    for name in FITTED_FACTORS:
        assert getattr(fitted.factors, name) == pytest.approx(getattr(preset, name), rel=0.02), name
    assert fitted.mape < 3.5


@pytest.mark.skipif(not CALIBRATED_ON.exists(), reason="the servers that the factors were fitted to are not here")
def test_factors_fitted_without_a_measured_server_predict_its_mean_decode_steps():
    steps = _calibration_steps()
    left_out = list(leave_one_out(steps, lambda rest: fit_factors(rest, start=DeviceFactors())))
    errors = [error for _, _, errors in left_out for error in errors]
    assert len(errors) == len(steps)
    assert mean_absolute_percentage_error(errors) < 6
    assert max(abs(error) for error in errors) < 0.15


@pytest.mark.slow
@each_server
def test_a_simulated_measured_server_serves_every_request_at_the_measured_pace(server: MeasuredServer):
    compared = _compared(SERVERS.index(server))
    if compared is None:
        pytest.skip(f"{server.model} on {server.gpu} is not built in")
    assert compared.run.num_finished == sum(stage.num_requests for stage in server.workload.stages)
    assert abs(compared.relative_errors["ms_per_token"]) < 0.15


@pytest.mark.slow
@pytest.mark.skipif(not SERVERS, reason="no measured_serving.jsonl")
def test_the_errors_over_all_measured_servers_meet_the_goals():
    runs = [compared for place in range(len(SERVERS)) if (compared := _compared(place)) is not None]
    mape = mape_over_runs(runs)
    assert not missed_goals(mape), mape
