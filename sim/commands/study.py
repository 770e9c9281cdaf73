"""`kvledger study`: plan, curve, replay and compare of one trace on one deployment, as one report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..scenario.curve import CurveOptions
from ..scenario.options import OptionSet
from ..scenario.scenario import Scenario
from ..search.jobs import STUDY
from .declare import Json, Plots, command

if TYPE_CHECKING:
    from ..study.study import Study

PAGE = "index.html"
DATA = "study.json"


@command(scenario=OptionSet.of(Scenario, STUDY), curve=OptionSet.of(CurveOptions, ("capacities",)))
def study(
    scenario: Scenario,
    curve: CurveOptions,
    output: Annotated[
        str,
        typer.Option(help="Folder of the report: study.json and index.html.", rich_help_panel="Output"),
    ] = "kvledger-report",
    plots: Plots = None,
    json: Json = False,
) -> None:
    """Plan, curve, replay and comparison of one trace on one deployment: the answer first, and a page to keep.

    Example: kvledger study --workload conversation --model llama-3.1-8b --gpu H100
    """
    import sys

    from ..report.console import PartsProgress
    from ..study.study import Study
    from .cli import EXIT_DOES_NOT_FIT

    progress = PartsProgress()
    found = Study(scenario, curve, progress.update)
    folder = Path(output)
    _make_folder(folder)
    try:
        with progress:
            found.run(progress.part_ended)
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

    from ..report.console import print_json
    from ..report.page import render_page
    from ..report.plot_files import write_plots
    from ..report.plots import study_plots
    from ..report.study_tables import print_study

    document = study.to_dict()
    _write(folder / DATA, dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    _write(folder / PAGE, render_page(document))
    if plots is not None:
        write_plots(study_plots(document), Path(plots))
    if json:
        print_json(document)
    else:
        print_study(document, folder / PAGE, folder / DATA)


def _make_folder(folder: Path) -> None:
    from ...core.errors import InputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror or error}; give a folder that can be written") from error


def _write(path: Path, text: str) -> None:
    from ...core.errors import InputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give --output a folder that can be written") from error
