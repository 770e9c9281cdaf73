"""A generated stream of requests as a `Trace`; built-in, fitted and mixed workloads use it."""

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import attrs

from ...core.errors import InputError
from ..traces import TraceInfo, Window
from ..traces.rows import Row, RowTrace, TurnRecord, check_window
from ..traces.trace import UNITS_PER_SECOND

# (arrival in seconds, input_length, output_length, hash_ids or None)
SessionRequest = tuple[float, int, int, tuple[int, ...] | None]
# The same, and the request's place in its session.
TurnRequest = tuple[float, int, int, tuple[int, ...] | None, TurnRecord | None]


class BlockIds:
    """Hands out unused block ids, from 0."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        """The next `count` ids."""
        first = self._next
        self._next += count
        return list(range(first, self._next))

    def grown(self, ids: list[int], shared_tokens: int, num_tokens: int, block_size: int) -> list[int]:
        """Ids of a prompt of `num_tokens` that shares its first `shared_tokens` with the prompt that has `ids`.

        Only blocks that both prompts fill keep their id; a partial block's content depends on where it ends.
        """
        kept = min(shared_tokens, num_tokens) // block_size
        return ids[:kept] + self.new(-(-num_tokens // block_size) - kept)


@attrs.frozen
class WorkloadModel:
    """A generator and its parameters; the fields without a comment are those of `TraceInfo`."""

    name: str
    resembles: str
    parameters: Any
    # The generator: (parameters, seed) -> requests in order of arrival.
    requests: Callable[[Any, int], Iterator[SessionRequest] | Iterator[TurnRequest]]
    duration_s: float  # length of the stream unless another is given
    trace_block_size: int | None
    stated: dict[str, object] | None = None  # the parameters in the report; all of them unless given
    about: str | None = None
    timestamp_unit: str = "ms"  # arrivals are rounded to it
    format: str = "built-in workload"
    full_blocks_only: bool = False
    links_turns: bool = False
    records_think_times: bool = False
    max_concurrency: int | None = None


def open_stream(
    model: WorkloadModel,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> RowTrace:
    """A `Trace` of a model; two with one seed are identical, in every process and on every Python version.

    The stream ends after `duration_s` on its own clock (the model's unless given) or after `limit` requests, whichever
    comes first. Raises `InputError` for an option out of range.
    """
    check_window(skip_first, limit, rate_scale)
    if duration_s is None:
        # With a number of requests and no time, the stream runs until it has them.
        duration_s = model.duration_s if limit is None else float("inf")
    if not duration_s > 0:
        raise InputError(f"the workload's duration is {duration_s} s; it must be above 0")
    units_per_second = UNITS_PER_SECOND[model.timestamp_unit]

    def rows(_: TraceInfo) -> Iterator[Row]:
        requests = takewhile(lambda request: request[0] < duration_s, model.requests(model.parameters, seed))
        for place, (arrival_s, input_length, output_length, hash_ids, *turn) in enumerate(requests, start=1):
            when = round(arrival_s * units_per_second)
            yield place, when, input_length, output_length, hash_ids, turn[0] if turn else None, 0

    stated = attrs.asdict(model.parameters) if model.stated is None else model.stated
    info = TraceInfo(
        name=model.name,
        path=None,
        format=model.format,
        timestamp_unit=model.timestamp_unit,
        trace_block_size=model.trace_block_size,
        trace_block_size_source=None if model.trace_block_size is None else "the workload's own",
        rate_scale=rate_scale,
        window=Window(skip_first, limit),
        full_blocks_only=model.full_blocks_only,
        links_turns=model.links_turns,
        records_think_times=model.records_think_times,
        max_concurrency=model.max_concurrency,
        about=model.about,
        workload={"resembles": model.resembles, "seed": seed, "parameters": stated},
    )
    return RowTrace(info, rows, units_per_second, f"workload {model.name}", f" in {duration_s:g} s")
