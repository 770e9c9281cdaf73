"""`kvledger sweep`: any command over a grid of options."""

import sys
from typing import Annotated, Any

import typer


def sweep(
    trace: Annotated[list[str] | None, typer.Argument(help="Trace files, as the command takes them.")] = None,
    command: Annotated[
        str, typer.Option(help="What to run: replay, fleet, size, optimum, curve, compare or plan.")
    ] = "replay",
    axes: Annotated[
        list[str] | None,
        typer.Option("--grid", help="NAME=V1,V2,... or NAME=0..9: an option of the command; give it several times."),
    ] = None,
    fixed: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, the same for every point; NAME=yes for a switch.")
    ] = None,
    minimize: Annotated[str | None, typer.Option(help="The best row has the smallest such figure: ttft_s.p99")] = None,
    maximize: Annotated[str | None, typer.Option(help="The best row has the largest: prefix_cache.hit_rate")] = None,
    require: Annotated[list[str] | None, typer.Option(help="Only rows that meet it can be best: ttft_s.p99<=2")] = None,
    show: Annotated[
        str | None, typer.Option(help="Figures of the table, comma-separated; those of the other options unless given.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes; with --cluster, tasks at the same time.")] = 1,
    keep: Annotated[
        str | None, typer.Option(help="Folder of finished points: an interrupted sweep goes on where it stopped.")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Run on Ray instead of processes here.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Run a command over a grid: a row for each point, in the order of the grid, and the best of them.

    Example: kvledger sweep --set workload=code --grid num-gpu-blocks-override=2000,4000 --grid max-num-seqs=64,128
    """
    from ..report.console import print_json
    from ..report.sweep import Sweep, SweepQuestion, print_sweep

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

    def tell() -> dict[str, Any]:
        document = run.document()
        if json:
            print_json(document)
        else:
            print_sweep(document, None if show is None else show.split(","))
        return document

    try:
        run.run()
    except KeyboardInterrupt:
        if run.rows:
            tell()
            again = "give --keep FOLDER to go on from them" if keep is None else "the same command goes on"
            print(f"kvledger: the rows above were done before the interrupt; {again}", file=sys.stderr)
        raise
    document = tell()
    if not any("result" in row for row in document["rows"]):
        from ...core.errors import InputError

        raise InputError(f"no point of the sweep has a result; the first: {document['rows'][0]['error']}")
