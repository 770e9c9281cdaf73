"""The requests that a command works on, by the options all commands share: a file, a built-in or a fitted workload."""

from collections.abc import Sequence
from typing import Any

from ...core.errors import InputError
from ..traces import Trace, open_trace
from ..traces.event_log import open_logged_trace, the_event_log


def open_trace_or_workload(
    trace: str | Sequence[str] | None,
    workload: str | None,
    *,
    fit: str | None = None,
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
    """Open exactly one of a trace, a workload by name, and a workload fitted to a trace.

    None stands for an option that was not given; one without effect is refused.
    """
    given = [source for source in (trace or None, workload, fit) if source is not None]
    if len(given) != 1:
        raise InputError(
            "give a trace file, --workload NAME or --fit FILE"
            + (", not more than one of them" if given else ", such as --workload conversation")
        )
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
    of_files: dict[str, Any] = {
        "format": trace_format,
        "timestamp_unit": timestamp_unit,
        "trace_block_size": trace_block_size,
        "tokenizer": tokenizer,
        "request_rate": request_rate,
    }
    if trace and (log := the_event_log(trace)) is not None:
        changed = {name: value for name, value in window.items() if value not in (0, 1.0)}
        return open_logged_trace(log, on_bad_row=on_bad_row, **of_files, **changed)
    if workload is None:
        of_files["on_bad_row"] = on_bad_row or "refuse"
    if trace:
        return open_trace(trace, seed=seed, **of_files, **window)
    if fit is not None:
        from ..workloads.fitting import open_fitted

        if request_rate is not None:
            of_files["seed"] = seed
        return open_fitted(open_trace(fit, **of_files), seed=seed or 0, **window)
    for option, value in {**of_files, "on_bad_row": on_bad_row}.items():
        if value is not None:
            raise InputError(f"--{option.replace('_', '-')} {value} has no effect on a built-in workload; leave it out")
    from ..workloads.builtin import open_workload
    from ..workloads.mix import is_mix, open_mix

    name = str(workload)
    return open_mix(name, seed=seed or 0, **window) if is_mix(name) else open_workload(name, seed=seed or 0, **window)
