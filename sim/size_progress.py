"""How a search gets on, on a terminal: the shape, the run, how many are left, and the time that is left for the run."""

import sys
from types import TracebackType
from typing import Any

from .console import console
from .size_search import SizeWatch
from .slo_search import Trial


class SizeProgress(SizeWatch):
    """Two bars on standard error while it is entered as a context; silent where that is no terminal.

    The first bar counts runs: how many there will be is known once the answer is bracketed, and is an upper bound. The
    second counts the requests of the run that goes on.
    """

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._runs = self._bars.add_task("looking for the answer", total=None)
        self._run = self._bars.add_task("run", total=None)
        self._num_done = 0
        self._shape = ""

    def __enter__(self) -> "SizeProgress":
        """Show the bars."""
        self._bars.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take them away."""
        self._bars.__exit__(kind, error, trace)

    def shape(self, text: str) -> None:
        """A shape is searched: its first bar starts again."""
        self._shape, self._num_done = text, 0
        self._bars.reset(self._runs, total=None, description=f"{text}: bracketing the answer")

    def starts(self, value: float, num_requests: int | None) -> None:
        """The second bar starts again."""
        self._bars.reset(self._run, total=num_requests, description=f"run of {value:.4g}, requests")

    def routed(self, num_requests: int) -> None:
        """The second bar grows."""
        self._bars.update(self._run, completed=num_requests)

    def ended(self, trial: Trial) -> None:
        """The first bar grows."""
        self._num_done += 1
        self._bars.update(self._runs, completed=self._num_done)

    def left(self, num_runs: int) -> None:
        """Now the first bar has an end."""
        self._update(self._runs, total=self._num_done + num_runs, description=f"{self._shape}: closing in, runs")

    def tornado(self, num_done: int, num_rows: int) -> None:
        """The first bar counts assumptions."""
        self._update(self._runs, completed=num_done, total=num_rows, description="what matters: assumptions")
        self._bars.update(self._run, visible=False)

    def _update(self, task: Any, **values: Any) -> None:
        self._bars.update(task, **values)
