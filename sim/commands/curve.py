"""`kvledger curve`: prefix-cache hit rate at every capacity, beside the optimum and other policies."""

from ..scenario.curve import CurveOptions
from ..scenario.scenario import Scenario
from ..search.jobs import CURVE
from .declare import Json, command


@command(scenario=CURVE)
def curve(scenario: Scenario, asked: CurveOptions, json: Json = False) -> None:
    """Show how much of the prompts a prefix cache serves, at every capacity.

    Example: kvledger curve --workload conversation --capacities 1000,10000,100000
    """
    from ..report.console import Bar, print_json
    from ..scenario.curve import curve_of_scenario

    with Bar("Reading the trace") as bar:

        def on_point(policy: str, num_blocks: int) -> None:
            bar.update(description=f"{policy} at {num_blocks:,} blocks", advance=1)

        result = curve_of_scenario(scenario, asked, on_progress=bar.count, on_point=on_point)
    if json:
        print_json(result.to_dict())
    else:
        from ..report.curve import print_curve  # needs libraries that the document does without

        print_curve(result)
