"""The requests that a command works on: trace files or a built-in workload, by the options all commands share."""

from collections.abc import Sequence
from typing import Any

from ..core.errors import InputError
from .event_log_dir import open_logged_trace, the_event_log
from .traces import Trace, open_trace
from .workload import open_workload


def open_trace_or_workload(
    trace: str | Sequence[str] | None,
    workload: str | None,
    *,
    trace_format: str | None = None,
    timestamp_unit: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    request_rate: float | None = None,
    on_bad_row: str | None = None,
    seed: int | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> Trace:
    """Open exactly one of the two. None stands for an option that was not given; one without effect is refused."""
    if (not trace) == (workload is None):
        raise InputError("give a trace file or --workload NAME" + (", not both" if trace else ", such as conversation"))
    if trace and (log := the_event_log(trace)) is not None:
        return open_logged_trace(
            log,
            format=trace_format,
            timestamp_unit=timestamp_unit,
            trace_block_size=trace_block_size,
            tokenizer=tokenizer,
            request_rate=request_rate,
            on_bad_row=on_bad_row,
            skip_first=skip_first or None,
            limit=limit,
            rate_scale=None if rate_scale == 1.0 else rate_scale,
        )
    window: dict[str, Any] = {"skip_first": skip_first, "limit": limit, "rate_scale": rate_scale}
    if trace:
        return open_trace(
            trace,
            format=trace_format,
            timestamp_unit=timestamp_unit,
            trace_block_size=trace_block_size,
            tokenizer=tokenizer,
            request_rate=request_rate,
            seed=seed,
            on_bad_row=on_bad_row or "refuse",
            **window,
        )
    of_files = {
        "--format": trace_format,
        "--timestamp-unit": timestamp_unit,
        "--trace-block-size": trace_block_size,
        "--tokenizer": tokenizer,
        "--request-rate": request_rate,
        "--on-bad-row": on_bad_row,
    }
    for option, value in of_files.items():
        if value is not None:
            raise InputError(f"{option} {value} has no effect on a built-in workload; leave it out")
    return open_workload(str(workload), seed=seed or 0, **window)
