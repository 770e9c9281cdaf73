"""`kvledger validate`: predictions beside serving points that were measured."""

from ..measured.validation import ValidateOptions
from .declare import Json, command


@command()
def validate(asked: ValidateOptions, json: Json = False) -> None:
    """Compare predicted TTFT and TPOT with serving points that were measured at a fixed concurrency.

    Example: kvledger validate points.csv
    """
    from ..measured.validation import validate as validated
    from ..report.console import Bar, print_result
    from ..report.validation import print_validation

    with Bar("Predicting") as bar:
        result = validated(asked, on_progress=lambda done, total: bar.update(completed=done, total=total))
    print_result(result, print_validation, json)
