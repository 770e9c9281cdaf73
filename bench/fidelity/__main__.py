"""Predicted against measured servers, run by run: `python -m bench.fidelity` at the root of the repository.

The servers are those of tests/golden/measured_serving.jsonl, or of another file of the same schema. Each one's whole
workload is simulated with its own limits and block count and one set of factors for its GPU type; nothing is read from
its latencies. `--refit` repeats the fit of the factors and prints what it predicts of servers that it left out;
`--leave-one-out` simulates every server with factors fitted to the others only.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from kvledger.core.errors import KVLedgerError
from kvledger.sim.latency.calibration import Calibration, MeasuredStep, fit_factors, leave_one_out
from kvledger.sim.latency.devices import DeviceFactors
from kvledger.sim.workloads.multi_turn import ARRIVALS, TURNS

from bench.fidelity.measured_serving import MeasuredServer, read_measured_serving
from bench.fidelity.served_run import (
    FIGURES,
    GOALS_PCT,
    ClientTerms,
    ComparedRun,
    mape_over_runs,
    measured_steps,
    simulate_server,
)

DEFAULT_FILE = Path(__file__).parents[2] / "tests" / "golden" / "measured_serving.jsonl"
# Assumptions that differ from run to run; the others are printed once.
OWN = ("num_gpu_blocks", "model", "tensor_parallel_size", "matrix_gb_per_rank", "head_gb_per_rank")


def main() -> int:
    options = _options()
    try:
        servers = [_assumed(server, options) for server in read_measured_serving(options.file)]
        steps = [step for server in servers for step in _steps(server)]
        if options.refit:
            _print_refit(steps)
            return 0
        return _print_fidelity(servers, steps, options)
    except KVLedgerError as error:
        print(error, file=sys.stderr)
        return 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument("--file", type=Path, default=DEFAULT_FILE, help="measured servers, one JSON object a line")
    parser.add_argument("--turns", choices=TURNS, default="repeated", help="what a session's next request holds")
    parser.add_argument("--arrivals", choices=ARRIVALS, default="random", help="how arrivals lie within a stage")
    parser.add_argument("--http-ms", type=float, default=ClientTerms().http_ms, help="the HTTP server's share of TTFT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-one-out", action="store_true", help="factors fitted to the other servers only")
    parser.add_argument("--refit", action="store_true", help="print the fit of the factors instead")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser.parse_args()


def _assumed(server: MeasuredServer, options: argparse.Namespace) -> MeasuredServer:
    workload = attrs.evolve(server.workload, turns=options.turns, arrivals=options.arrivals)
    return attrs.evolve(server, workload=workload)


def _steps(server: MeasuredServer) -> list[MeasuredStep]:
    """None for a server whose model or GPU is not built in: it is reported as not predicted."""
    try:
        return measured_steps(server)
    except KVLedgerError:
        return []


def _fit(steps: list[MeasuredStep]) -> Calibration:
    return fit_factors(steps, start=DeviceFactors())


def _print_refit(steps: list[MeasuredStep]) -> None:
    calibration = _fit(steps)
    print(f"mean decode steps of {len(steps)} stages, ms a token: {calibration.mape_before:.1f} % off before the fit,")
    print(f"{calibration.mape:.1f} % after it\n")
    for name, value in calibration.factors.assumptions().items():
        print(f"  {name:<30} {value:.4g}" if isinstance(value, float) else f"  {name:<30} {value}")
    print("\nserver               errors before, after, and of a fit to the other servers")
    without = {label: errors for label, _, errors in leave_one_out(steps, lambda rest: _fit(list(rest)))}
    for label in dict.fromkeys(calibration.labels):
        places = [index for index, name in enumerate(calibration.labels) if name == label]
        before = _percents([calibration.errors_before[place] for place in places])
        after = _percents([calibration.errors_after[place] for place in places])
        print(f"{label:<20} {before:<20} {after:<20} {_percents(without[label])}")


def _percents(errors: list[float] | tuple[float, ...]) -> str:
    return " ".join(f"{error:+.1%}" for error in errors)


def _print_fidelity(servers: list[MeasuredServer], steps: list[MeasuredStep], options: argparse.Namespace) -> int:
    client = ClientTerms(http_ms=options.http_ms)
    runs: list[ComparedRun] = []
    not_predicted: dict[str, str] = {}
    for server in servers:
        try:
            factors = _factors_without(server, steps) if options.leave_one_out else None
            run = simulate_server(server, client=client, seed=options.seed, factors=factors)
        except KVLedgerError as error:
            not_predicted[server.name] = str(error)
            continue
        runs.append(ComparedRun.of(server, run))
        if not options.json:
            _print_run(runs[-1])
    mape = mape_over_runs(runs) if runs else {}
    if options.json:
        document = {
            "runs": [run.to_json() for run in runs],
            "mape_pct": mape,
            "goals_pct": GOALS_PCT,
            "not_predicted": not_predicted,
        }
        print(json.dumps(document, indent=2))
        return 0
    _print_means(mape, runs)
    for name, reason in not_predicted.items():
        print(f"not predicted: {name}: {reason}")
    if runs:
        _print_assumptions(runs)
    return 0


def _factors_without(server: MeasuredServer, steps: list[MeasuredStep]) -> DeviceFactors:
    return _fit([step for step in steps if step.label != server.name]).factors


def _print_run(compared: ComparedRun) -> None:
    server, run = compared.server, compared.run
    print(f"{server.name}  {server.model}  {server.gpu} x {server.tensor_parallel_size}")
    print(
        f"  {run.num_finished:,} requests, {run.prefix_hit_rate:.1%} of prompt tokens hit, {run.num_preemptions}"
        f" preemptions; measured text chunks a token {compared.chunks_per_token:.3f}"
        f"{'' if compared.chunks_agree else ' (E2E not in the goals)'}"
    )
    predicted, measured, errors = compared.predicted, compared.measured, compared.relative_errors
    for name in FIGURES:
        print(f"  {name:<14}{predicted[name]:>11.2f} ms {measured[name]:>11.2f} ms {errors[name]:>+8.1%}")
    print(flush=True)


def _print_means(mape: Mapping[str, float], runs: list[ComparedRun]) -> None:
    print("figure          mean absolute percentage error    goal")
    for name, value in mape.items():
        goal = f"{GOALS_PCT[name]:.0f} %" if name in GOALS_PCT else ""
        number = sum(run.chunks_agree or not name.startswith("e2e") for run in runs)
        print(f"{name:<16}{value:>8.1f} %  over {number} runs {goal:>16}")
    print()


def _print_assumptions(runs: list[ComparedRun]) -> None:
    print("assumptions")
    shared: dict[str, Any] = dict(runs[0].run.assumptions)
    own = [name for name in shared if any(run.run.assumptions.get(name) != shared[name] for run in runs)]
    for name, value in shared.items():
        if name not in own:
            print(f"  {name:<30} {value:.6g}" if isinstance(value, float) else f"  {name:<30} {value}")
    print("assumptions that differ from run to run")
    for compared in runs:
        figures = {name: compared.run.assumptions.get(name) for name in OWN}
        print(f"  {compared.server.name:<18}", "; ".join(f"{name} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
