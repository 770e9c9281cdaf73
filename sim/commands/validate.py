"""`kvledger validate`: predictions beside serving points that were measured."""

from ..measured.results import SHAPE
from ..measured.validation import ValidateOptions
from ..scenario.scenario import Scenario
from .declare import Json, Plots, command


@command(scenario=SHAPE)
def validate(asked: ValidateOptions, scenario: Scenario, plots: Plots = None, json: Json = False) -> None:
    """Compare predicted TTFT and TPOT with serving points that were measured at a fixed concurrency.

    Example: kvledger validate points.csv
    Example: kvledger validate bench.json --model llama-3.1-8b --gpu H100
    """
    from pathlib import Path

    from ..measured.validation import validate as validated
    from ..report.console import Bar, print_result
    from ..report.plot_files import write_plots
    from ..report.validation import print_validation, validation_plots

    with Bar("Predicting") as bar:
        result = validated(asked, scenario, on_progress=lambda done, total: bar.update(completed=done, total=total))
    if plots is not None:
        write_plots(validation_plots(result), Path(plots))
    print_result(result, print_validation, json)
