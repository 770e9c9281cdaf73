"""Cut the measurement window out of a stream of rows, count arrivals from its start, and keep the tally."""

import math
from collections.abc import Iterable, Iterator

from ...core.errors import InputError
from .format import Row
from .sessions import OpenSessions
from .trace import TraceInfo, TraceRequest


def check_window(skip_first: int, limit: int | None, rate_scale: float) -> None:
    """Refuse a window or a rate that no trace could have."""
    if skip_first < 0:
        raise InputError(f"--skip-first is {skip_first}; it must be 0 or more requests")
    if limit is not None and limit < 1:
        raise InputError(f"--limit is {limit}; it must be 1 request or more")
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise InputError(f"--rate-scale is {rate_scale}; it must be a number above 0 (2 doubles the request rate)")


def requests_in_window(rows: Iterable[Row], info: TraceInfo, units_per_second: int) -> Iterator[TraceRequest]:
    """The requests after the first `skip_first` rows, at most `limit` of them; `info` grows as they are read."""
    window = info.window
    scaled_units_per_second = units_per_second * info.rate_scale
    trace_start: int | float = 0
    window_start: int | float = 0
    sessions = OpenSessions(info, units_per_second)
    for place, when, input_length, output_length, hash_ids, record, priority in rows:
        turn = None if record is None else sessions.turn(place, when, record)
        if info.num_rows_read == 0:
            trace_start = when
        info.num_rows_read += 1
        if info.num_rows_read <= window.skip_first:
            continue
        if info.num_requests == 0:
            window_start = when
            window.first_place = place
            window.start_s = (when - trace_start) / units_per_second
        info.num_requests += 1
        info.input_tokens += input_length
        info.output_tokens += output_length
        info.num_requests_without_hash_ids += hash_ids is None
        window.last_place = place
        window.end_s = (when - trace_start) / units_per_second
        arrival_s = (when - window_start) / scaled_units_per_second
        if turn is not None and info.rate_scale != 1:
            turn = turn.at_rate(info.rate_scale)
        yield TraceRequest(arrival_s, input_length, output_length, hash_ids, place, turn, priority)
        if info.num_requests == window.limit:
            return
