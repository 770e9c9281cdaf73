"""What `kvledger size` does: search with progress, tell the answer, and tell what is done when it is interrupted."""

import sys
from pathlib import Path

from ..report.console import print_json
from ..report.plot_files import write_plots
from ..report.size import SizeProgress, print_size
from ..report.size_plots import size_plots
from ..search.size_question import SizeQuestion
from ..search.size_search import SizeStudy


def run_size(question: SizeQuestion, plots: str | None, *, as_json: bool) -> bool:
    """Search, print, and draw into the folder `plots`; False where the answer is no.

    Raises:
        KeyboardInterrupt: after the runs that were done are told.
    """
    progress = SizeProgress()
    study = SizeStudy(question, progress)
    try:
        with progress:
            study.run()
    except KeyboardInterrupt:
        if study.has_runs:
            _tell(study, plots, as_json=as_json)
            again = "give --keep FOLDER to go on from them" if question.kept_in is None else "the same command goes on"
            print(f"kvledger: the runs above were done before the interrupt; {again}", file=sys.stderr)
        raise
    return _tell(study, plots, as_json=as_json)


def _tell(study: SizeStudy, plots: str | None, *, as_json: bool) -> bool:
    document = study.document()
    if plots is not None:
        write_plots(size_plots(document), Path(plots))
    if as_json:
        print_json(document)
    else:
        print_size(document)
    return document["answer"] is not None
