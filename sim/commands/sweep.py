"""`kvledger sweep`: any command over a grid of options."""

import sys
from typing import Annotated, Any

import typer

from .declare import Jobs, Json, Keep


def sweep(
    trace: Annotated[
        list[str] | None, typer.Argument(metavar="TRACE", help="Trace files, as the command takes them.")
    ] = None,
    command: Annotated[
        str,
        typer.Option(
            help="What to run: replay, fleet, size, optimum, curve, compare or plan.", rich_help_panel="Search"
        ),
    ] = "replay",
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="NAME=V1,V2,... or NAME=0..9: values of an option of the command; repeatable.",
            rich_help_panel="Search",
        ),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="NAME=VALUE, the same for every point; NAME=yes for a switch; repeatable.",
            rich_help_panel="Search",
        ),
    ] = None,
    minimize: Annotated[
        str | None, typer.Option(help="Best row: the smallest figure, such as ttft_s.p99.", rich_help_panel="Search")
    ] = None,
    maximize: Annotated[
        str | None,
        typer.Option(help="Best row: the largest figure, such as prefix_cache.hit_rate.", rich_help_panel="Search"),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(help="Condition on the best row, such as ttft_s.p99<=2; repeatable.", rich_help_panel="Search"),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            help="Figures of the table, comma-separated. Unless given: those of the other options.",
            rich_help_panel="Output",
        ),
    ] = None,
    jobs: Jobs = 1,
    keep: Keep = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Run on Ray instead of processes here.", rich_help_panel="Search")
    ] = False,
    json: Json = False,
) -> None:
    """Run a command over a grid: a row for each point, in the order of the grid, and the best of them.

    Example: kvledger sweep --set workload=code --grid num-gpu-blocks-override=2000,4000 --grid max-num-seqs=64,128
    """
    from ..report.comparisons import print_sweep
    from ..report.console import print_json, progress
    from ..search.sweep import Sweep, SweepQuestion

    question = SweepQuestion(
        command=command,
        files=tuple(trace or ()),
        axes=tuple(axes or ()),
        fixed=tuple(fixed or ()),
        minimize=minimize,
        maximize=maximize,
        require=tuple(require or ()),
        num_workers=jobs,
        kept_in=keep,
        cluster=cluster,
    )
    run = Sweep(question)

    def report() -> dict[str, Any]:
        document = run.to_dict()
        if json:
            print_json(document)
        else:
            print_sweep(document, None if show is None else show.split(","))
        return document

    bar, task = progress("Points", total=run.num_points)
    try:
        with bar:
            run.run(lambda row: bar.advance(task))
    except KeyboardInterrupt:
        if run.rows:
            report()
            again = "give --keep FOLDER to go on from them" if keep is None else "the same command goes on"
            print(f"kvledger: the rows above were done before the interrupt; {again}", file=sys.stderr)
        raise
    document = report()
    if not any("result" in row for row in document["rows"]):
        from ...core.errors import InputError

        raise InputError(f"no point of the sweep has a result; the first: {document['rows'][0]['error']}")
