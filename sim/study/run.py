"""What `kvledger study` does: run the parts, write the report, tell the answer; keep what is done when interrupted."""

import json
import sys
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..report.console import console, print_json
from ..report.page import render_page
from ..report.plot_files import write_plots
from ..report.plots import study_plots
from ..report.study_tables import print_study
from .setup import read_study
from .study import Study

PAGE = "index.html"
DATA = "study.json"


def run_study(given: dict[str, Any]) -> bool:
    """Run the study that the options describe, write and print it; False where the deployment does not fit.

    Raises:
        InputError: an option or the trace is wrong, or the folder cannot be written.
        KeyboardInterrupt: after the parts that were done are written and said.
    """
    folder = Path(given["output"])
    study = Study(read_study(given))
    _make_folder(folder)
    try:
        study.run(_tell_progress)
    except KeyboardInterrupt:
        if study.done:
            _finish(study, folder, given["plots"], as_json=given["json"])
            print(f"kvledger: {', '.join(study.done)} done before the interrupt, and kept in {folder}", file=sys.stderr)
        raise
    _finish(study, folder, given["plots"], as_json=given["json"])
    return study.fits


def _finish(study: Study, folder: Path, plots: str | None, *, as_json: bool) -> None:
    document = study.document()
    _write(folder / DATA, json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    _write(folder / PAGE, render_page(document))
    if plots is not None:
        write_plots(study_plots(document), Path(plots))
    if as_json:
        print_json(document)
    else:
        print_study(document, folder / PAGE, folder / DATA)


def _tell_progress(part: str, reason: str | None) -> None:
    """One line a part on a terminal, silence elsewhere."""
    if sys.stderr.isatty():
        console(stderr=True).print(f"{part}: {'done' if reason is None else f'left out, {reason}'}", markup=False)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror or error}; give a folder that can be written") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give --output a folder that can be written") from error
