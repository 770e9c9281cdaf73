"""The requests that a command works on: a trace file or a built-in workload, by the options all commands share."""

from typing import Any

from ..core.errors import InputError
from .traces import Trace, open_trace
from .workload import open_workload


def open_trace_or_workload(
    trace: str | None,
    workload: str | None,
    *,
    trace_format: str | None = None,
    trace_block_size: int | None = None,
    on_bad_row: str | None = None,
    seed: int | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> Trace:
    """Open exactly one of the two. None stands for an option that was not given; one without effect is refused."""
    if (trace is None) == (workload is None):
        raise InputError(
            "give a trace file or --workload NAME" + (", not both" if trace is not None else ", such as conversation")
        )
    window: dict[str, Any] = {"skip_first": skip_first, "limit": limit, "rate_scale": rate_scale}
    if trace is not None:
        _refuse_what_has_no_effect("a trace file", {"--seed": seed})
        return open_trace(
            trace, format=trace_format, trace_block_size=trace_block_size, on_bad_row=on_bad_row or "refuse", **window
        )
    of_files = {"--format": trace_format, "--trace-block-size": trace_block_size, "--on-bad-row": on_bad_row}
    _refuse_what_has_no_effect("a built-in workload", of_files)
    return open_workload(str(workload), seed=seed or 0, **window)


def _refuse_what_has_no_effect(source: str, options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value} has no effect on {source}; leave it out")
