"""`kvledger size`: how many GPUs, in what shape, keep an SLO on a trace."""

from typing import TYPE_CHECKING

import typer

from ..scenario.scenario import Scenario
from ..search.jobs import SIZE
from ..search.size_question import SizeOptions
from .declare import Json, Plots, command

if TYPE_CHECKING:
    from ..search.size_search import SizeStudy


@command(scenario=SIZE)
def size(scenario: Scenario, asked: SizeOptions, plots: Plots = None, json: Json = False) -> None:
    """Find how many replicas and GPUs keep a service-level objective on a trace: bisection over full replays.

    With --replicas N: the highest request rate at which N replicas keep it.

    Example: kvledger size trace.jsonl --model llama-3.1-70b --gpu H100 --slo-ttft-p99 2 --block-size 64
    """
    import sys

    from ..report.size import SizeProgress
    from ..search.size_search import SizeStudy
    from .cli import EXIT_DOES_NOT_FIT

    progress = SizeProgress()
    study = SizeStudy(scenario, asked, progress)
    try:
        with progress.bar:
            study.run()
    except KeyboardInterrupt:
        if study.has_runs:
            _report(study, plots, json)
            again = "give --keep FOLDER to go on from them" if asked.keep is None else "the same command goes on"
            print(f"kvledger: the runs above were done before the interrupt; {again}", file=sys.stderr)
        raise
    if not _report(study, plots, json):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _report(study: "SizeStudy", plots: str | None, json: bool) -> bool:
    """Print and draw what is done; False where the answer is no."""
    from pathlib import Path

    from ..report.console import print_result
    from ..report.plot_files import write_plots
    from ..report.size import print_size, size_plots

    document = study.to_dict()
    if plots is not None:
        write_plots(size_plots(document), Path(plots))
    print_result(document, print_size, json)
    return document["answer"] is not None
