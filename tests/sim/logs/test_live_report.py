"""Measured step times of a live run against latency models: fits find what is true, and say what is not told."""

import json

import attrs
import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="event logs need pyarrow")

from kvledger.backends.serving.engine.recording import live_header
from kvledger.backends.sinks import DurableLog, FlushPolicy, LogReader, StepComputed
from kvledger.core import AllocatorConfig, FullAttention, InputError, KVCacheAllocator, SchedulerConfig, StepLoad
from kvledger.core.models.geometry import load_geometry
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.fitted import (
    BASE,
    COLUMNS,
    PLAIN,
    PREFILL_STEP,
    FittedLatency,
    MeasuredSteps,
    fit_latency,
    measured_steps,
)
from kvledger.sim.latency.roofline import RooflineLatency
from kvledger.sim.logs.live_report import fit_roofline, live_report

COSTS = {
    BASE: 2e-3,
    "num_prefill_tokens": 30e-6,
    "num_decode_tokens": 80e-6,
    "prefill_context_tokens": 4e-9,
    "decode_context_tokens": 50e-9,
    "num_sampled": 10e-6,
}


def some_loads(count=400, seed=0, prefill=True):
    """Steps as an engine runs them: many that only decode, some with prompts."""
    random = np.random.default_rng(seed)
    loads = []
    for _ in range(count):
        decode = int(random.integers(1, 65))
        tokens = int(random.integers(1, 2000)) if prefill and random.random() < 0.4 else 0
        if tokens and random.random() < 0.2:
            decode = 0
        context = decode * int(random.integers(10, 3000))
        sampled = decode + int(tokens > 0 and random.random() < 0.5)
        loads.append((tokens, decode, tokens * (tokens + 1) // 2, context, sampled, 0))
    return np.array(loads, dtype=np.int64)


def timed(loads, latency, noise=0.0, seed=1):
    """What a model says, disturbed by a relative error."""
    steps = MeasuredSteps(loads, np.ones(len(loads)))
    seconds = steps.predicted(latency)
    return MeasuredSteps(loads, seconds * (1 + noise * np.random.default_rng(seed).normal(size=len(loads))))


def test_decode_steps_that_are_captured_and_prompts_that_are_not_are_told_apart() -> None:
    captured = FittedLatency(COSTS | {PREFILL_STEP: 12e-3}, 0)
    report = live_report(timed(some_loads(), captured))
    assert report.best.name == "linear with prefill steps" and report.best.error_unseen < 0.001
    assert report.best.after.costs == pytest.approx(captured.costs, rel=0.01)
    assert all(model.error_unseen > 0.02 for model in report.models[:2])


def test_costs_that_are_true_are_found_again() -> None:
    fitted = fit_latency(timed(some_loads(), FittedLatency(COSTS, 0)))
    assert fitted.costs == pytest.approx(COSTS, rel=1e-3)
    assert fitted.untold == () and fitted.num_steps == 400


def test_a_tenth_of_wild_outliers_hardly_moves_a_fit() -> None:
    steps = timed(some_loads(), FittedLatency(COSTS, 0), noise=0.02)
    seconds = steps.seconds.copy()
    seconds[::10] *= 20  # something else ran on the machine
    fitted = fit_latency(MeasuredSteps(steps.loads, seconds))
    calm = np.delete(np.arange(400), np.s_[::10])
    errors = steps.predicted(fitted)[calm] / steps.seconds[calm] - 1
    assert np.abs(errors).mean() < 0.03


def test_no_cost_is_negative_and_none_grows_where_more_work_took_less_time() -> None:
    loads = some_loads(prefill=False)
    steps = MeasuredSteps(loads, 1.0 / loads[:, COLUMNS.index("num_decode_tokens")])
    fitted = fit_latency(steps)
    assert all(cost >= 0 for cost in fitted.costs.values()) and fitted.costs["num_decode_tokens"] == 0


def test_what_the_steps_do_not_tell_is_named_and_costs_nothing() -> None:
    fitted = fit_latency(timed(some_loads(prefill=False), FittedLatency(COSTS, 0)), PLAIN)
    assert fitted.untold == ("num_prefill_tokens",)
    assert fitted.assumptions()["not_told_by_the_steps"] == ["num_prefill_tokens"]
    assert fitted.step_seconds(StepLoad(1000, 0, 1, 0, 1)) == fitted.costs[BASE]


def test_a_fit_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="at least one measured step"):
        fit_latency(MeasuredSteps(np.empty((0, 6), np.int64), np.empty(0)))


def test_every_step_is_of_one_kind() -> None:
    steps = timed(some_loads(), FittedLatency(COSTS, 0))
    kinds = steps.kinds()
    assert sum([which.astype(int) for _, which in kinds]).tolist() == [1] * len(steps)
    for name, which in kinds:
        part, extent, _ = name.replace(",", "").split(" ", 2)
        tokens = steps.loads[which][:, :2].sum(axis=1)
        assert tokens.min() >= int(extent) and tokens.max() < 2 * int(extent)
        assert (steps.column("num_prefill_tokens")[which] > 0).all() == (part != "decode")


def test_a_report_says_how_far_off_models_are_before_after_and_on_steps_they_have_not_seen() -> None:
    report = live_report(timed(some_loads(), FittedLatency(COSTS, 0), noise=0.05))
    linear, context, steps = report.models
    assert [model.name for model in report.models] == ["linear", "linear with context", "linear with prefill steps"]
    assert steps.error_unseen == pytest.approx(context.error_unseen, abs=0.003)
    assert context.error_before is None
    assert linear.error_before > 0.3 > 0.15 > linear.error_after > context.error_after
    assert 0.03 < context.error_after < context.error_unseen < 0.05
    assert abs(context.total_error) < 0.02
    rows = report.rows()
    assert sum(row["steps"] for row in rows) == 400
    assert all(abs(row["error_pct"]) < 15 for row in rows if row["steps"] > 10)
    json.dumps(report.to_json())


def test_a_models_error_on_unseen_steps_is_not_that_of_the_steps_that_it_was_fitted_to() -> None:
    """Times that nothing explains: the fit follows its own steps a little, and the others not at all."""
    loads = some_loads(12)
    seconds = np.random.default_rng(3).uniform(0.001, 0.1, 12)
    report = live_report(MeasuredSteps(loads, seconds))
    assert all(model.error_unseen > model.error_after for model in report.models)


def roofline(**changes):
    latency = RooflineLatency.for_model(
        load_geometry("llama-3.1-8b"), find_device("H200"), max_num_seqs=64, enforce_eager=True
    )
    return attrs.evolve(latency, factors=attrs.evolve(latency.factors, **changes))


def test_a_roofline_is_calibrated_from_kinds_of_steps() -> None:
    truth = roofline(step_s=9e-3, layer_s=60e-6, compute_efficiency=0.4, weights_bandwidth_efficiency=0.5)
    steps = timed(some_loads(), truth, noise=0.03)
    expected = roofline()
    before = np.abs(steps.predicted(expected) / steps.seconds - 1).mean()
    after = np.abs(steps.predicted(fit_roofline(steps, expected)) / steps.seconds - 1).mean()
    assert before > 0.2 and after < 0.06


@pytest.fixture
def live_log(tmp_path):
    """A log of a live run with so many measured steps."""

    def write(count, latency=None):
        latency = roofline(step_s=5e-3) if latency is None else latency
        config = AllocatorConfig(num_blocks=10, groups=[FullAttention(4)], max_model_len=36)
        header = live_header(config, SchedulerConfig(max_num_seqs=64), {})
        with DurableLog.create(tmp_path / f"{count}.log", flush=FlushPolicy(every_commits=1), header=header) as log:
            KVCacheAllocator(config, sinks=[log])
            for load, seconds in timed(some_loads(count), latency, noise=0.02).each():
                log.note(StepComputed(round(seconds * 1e9), load))
        return tmp_path / f"{count}.log"

    return write


def test_steps_come_from_the_log_as_they_were_measured(live_log) -> None:
    directory = live_log(50)
    steps = measured_steps(LogReader(directory))
    assert (steps.loads == some_loads(50)).all() and len(measured_steps(LogReader(directory), 10)) == 40


def test_log_steps_prints_the_comparison(live_log, kvledger) -> None:
    directory = live_log(200)
    code, out, _ = kvledger("log", "steps", directory, "--model", "llama-3.1-8b", "--gpu", "H200")
    assert code == 0 and "roofline" in out and "unseen steps" in out and "--latency linear --base-ms" in out
    code, out, _ = kvledger("log", "steps", directory, "--model", "llama-3.1-8b", "--gpu", "H200", "--json")
    document = json.loads(out)
    assert code == 0 and document["steps"] == 200
    of = {model["name"]: model for model in document["models"]}
    assert of["roofline"]["mape_pct"] < 5 < of["roofline"]["mape_before_pct"]
    code, out, _ = kvledger("log", "steps", directory, "--skip-first", 100, "--json")
    assert code == 0 and json.loads(out)["steps"] == 100


def test_the_options_that_it_prints_are_those_of_a_replay(live_log, kvledger) -> None:
    _, out, _ = kvledger("log", "steps", live_log(200), "--json")
    options = json.loads(out)["replay_options"].split()
    code, out, _ = kvledger(
        "replay", "--workload", "conversation", "--limit", 5, "--num-gpu-blocks-override", 5000, *options, "--json"
    )
    assert code == 0 and json.loads(out)["assumptions"]["base_ms"] == float(options[options.index("--base-ms") + 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-3.1-8b"], "--model and --gpu go together"),
        (["--weights-dtype", "fp8"], "has no effect without --model"),
        (["--skip-first", "-1"], "--skip-first is -1"),
        (["--skip-first", "49"], "holds 50 measured steps, of which 49 are left out"),
    ],
)
def test_options_that_make_no_sense_are_refused(live_log, kvledger, options, message) -> None:
    code, _, err = kvledger("log", "steps", live_log(50), *options)
    assert code == 2 and message in err


def test_a_log_that_is_of_no_live_run_is_refused(tmp_path, kvledger) -> None:
    with DurableLog.create(tmp_path / "bare", flush=FlushPolicy(every_commits=1)):
        pass
    code, _, err = kvledger("log", "steps", tmp_path / "bare")
    assert code == 2 and "it is not the log of a live engine" in err
