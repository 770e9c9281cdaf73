"""`kvledger sweep`: any command over a grid of options."""

import sys
from typing import Annotated

import typer

from ..search.sweep import Sweep, SweepQuestion
from .declare import Json, command


@command()
def sweep(
    question: SweepQuestion,
    show: Annotated[
        str | None,
        typer.Option(
            help="Figures of the table, comma-separated. Unless given: those of the other options.",
            rich_help_panel="Output",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run a command over a grid: a row for each point, in the order of the grid, and the best of them.

    Example: kvledger sweep --set workload=code --grid num-gpu-blocks-override=2000,4000 --grid max-num-seqs=64,128
    """
    from ...core.errors import InputError
    from ..report.comparisons import print_sweep
    from ..report.console import Bar, print_result

    run = Sweep(question)

    def report() -> None:
        print_result(run, lambda run: print_sweep(run.to_dict(), None if show is None else show.split(",")), json)

    try:
        with Bar("Points", total=run.num_points) as bar:
            run.run(lambda row: bar.update(advance=1))
    except KeyboardInterrupt:
        if run.rows:
            report()
            again = "give --keep FOLDER to go on from them" if question.kept_in is None else "the same command goes on"
            print(f"kvledger: the rows above were done before the interrupt; {again}", file=sys.stderr)
        raise
    report()
    if not any("result" in row for row in run.rows):
        raise InputError(f"no point of the sweep has a result; the first: {run.rows[0]['error']}")
