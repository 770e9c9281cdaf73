"""`kvledger validate`: predictions beside serving points that were measured."""

from ..measured.results import SHAPE
from ..measured.validation import ValidateOptions
from ..scenario.scenario import Scenario
from .declare import Json, command


@command(scenario=SHAPE)
def validate(asked: ValidateOptions, scenario: Scenario, json: Json = False) -> None:
    """Compare predicted TTFT and TPOT with serving points that were measured at a fixed concurrency.

    Example: kvledger validate points.csv
    Example: kvledger validate bench.json --model llama-3.1-8b --gpu H100
    """
    from ..measured.validation import validate as validated
    from ..report.console import Bar, print_result
    from ..report.validation import print_validation

    with Bar("Predicting") as bar:
        result = validated(asked, scenario, on_progress=lambda done, total: bar.update(completed=done, total=total))
    print_result(result, print_validation, json)
