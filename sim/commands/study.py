"""`kvledger study`: plan, curve, replay and compare of one trace on one deployment, as one report."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import InputError
from ..scenario.curve import CurveOptions
from ..scenario.scenario import Scenario
from ..search.jobs import STUDY
from .declare import Json, Plots, command

if TYPE_CHECKING:
    from ..study.study import Study

PAGE = "index.html"
DATA = "study.json"


@command(scenario=STUDY, curve=["capacities"])
def study(
    scenario: Scenario,
    curve: CurveOptions,
    output: Annotated[
        str, typer.Option(help="Folder of the report: study.json and index.html.", rich_help_panel="Output")
    ] = "kvledger-report",
    plots: Plots = None,
    json: Json = False,
) -> None:
    """Plan, curve, replay and comparison of one trace on one deployment: the answer first, and a page to keep.

    Example: kvledger study --workload conversation --model llama-3.1-8b --gpu H100
    """
    import sys

    from ..report.console import Bar
    from ..study.study import Study
    from .cli import EXIT_DOES_NOT_FIT

    bar = Bar()
    found = Study(scenario, curve, bar.part)
    folder = Path(output)
    with _writing(f"--output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with bar:
            found.run(bar.part_ended)
    except KeyboardInterrupt:
        if found.done:
            _finish(found, folder, plots, json)
            print(f"kvledger: {', '.join(found.done)} done before the interrupt, and kept in {folder}", file=sys.stderr)
        raise
    _finish(found, folder, plots, json)
    if not found.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _finish(study: "Study", folder: Path, plots: str | None, json: bool) -> None:
    from json import dumps

    from ..report.console import print_result
    from ..report.page import render_page
    from ..report.plot_files import write_plots
    from ..report.plots import study_plots
    from ..report.study_tables import print_study

    document = study.to_dict()
    text = dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    for name, content in ((DATA, text), (PAGE, render_page(document))):
        with _writing(f"{folder / name}"):
            (folder / name).write_text(content, encoding="utf-8")
    if plots is not None:
        write_plots(study_plots(document), Path(plots))
    print_result(document, lambda document: print_study(document, folder / PAGE, folder / DATA), json)


@contextmanager
def _writing(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}; give --output a folder that can be written") from error
