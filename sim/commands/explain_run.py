"""`kvledger explain-run`: a measured run beside its simulation, request by request."""

from ..measured.explained import ExplainOptions
from ..scenario.scenario import Scenario
from ..search.jobs import EXPLAIN
from .declare import Json, command


@command(scenario=EXPLAIN)
def explain_run(scenario: Scenario, asked: ExplainOptions, json: Json = False) -> None:
    """Replay a run that was measured request by request, and say how far the simulation is off and why.

    Example: kvledger explain-run bench.json --model llama-3.1-8b --gpu H100
    Example: kvledger explain-run bench.json --model llama-3.1-8b --gpu H100 --calibrate server.json --output report
    """
    from pathlib import Path

    from ..measured.explained import explain_run as explained
    from ..report.console import Bar, print_result
    from ..report.explained import print_explained, write_page

    with Bar("Replaying") as bar:
        result = explained(scenario, asked, on_part=lambda text: bar.update(description=text))
    if asked.output is not None:
        write_page(result, Path(asked.output))
    print_result(result, lambda result: print_explained(result, asked.output), json)
