"""Mix several traces or workloads: merged in order of arrival, each at its own rate, sharing no blocks."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ..traces import Trace, TraceInfo, TraceRequest, Window, open_trace
from ..traces.derived import ReblockedTrace
from ..traces.rows import Row, RowTrace, TurnRecord, check_window
from .builtin import open_workload

NANOSECONDS = 1_000_000_000
PART = re.compile(r"(?P<name>.*?)(?:\*(?P<factor>[0-9.eE+-]+)|@(?P<rate>[0-9.eE+-]+))?")
# Seeds of the parts differ by this, so that two parts of one name are not the same requests twice.
SEED_STEP = 1_000_003


@attrs.frozen
class MixPart:
    """One part of a mix: a trace whose requests come `rate_scale` times as fast as recorded."""

    trace: Trace
    rate_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        if not (math.isfinite(self.rate_scale) and self.rate_scale > 0):
            raise InputError(f"a part of a mix has the rate scale {self.rate_scale}; it must be a number above 0")


def part_at_rate(trace: Trace, requests_per_s: float) -> MixPart:
    """A part that sends `requests_per_s`, scaled by the trace's own rate, which one pass over it measures.

    Raises:
        InputError: the rate is not above 0, or the trace has no rate because all its requests come at once.
    """
    if not (math.isfinite(requests_per_s) and requests_per_s > 0):
        raise InputError(f"a part of a mix has {requests_per_s} requests a second; it must be a number above 0")
    count, last_s = 0, 0.0
    for request in trace:
        count, last_s = count + 1, request.arrival_s
    if count < 2 or last_s <= 0:
        raise InputError(f"{trace.info.name}: all its requests come at once, so it has no rate to be scaled")
    return MixPart(trace, requests_per_s * last_s / (count - 1))


def parts_by_weight(traces: Sequence[Trace], weights: Sequence[float], requests_per_s: float) -> list[MixPart]:
    """Parts that share `requests_per_s` in proportion to their weights."""
    if len(traces) != len(weights) or not traces or min(weights) <= 0:
        raise InputError(f"{len(traces)} parts of a mix have the weights {list(weights)}; each needs one above 0")
    return [
        part_at_rate(trace, requests_per_s * weight / sum(weights))
        for trace, weight in zip(traces, weights, strict=True)
    ]


def mix_workloads(
    parts: Sequence[MixPart], *, skip_first: int = 0, limit: int | None = None, rate_scale: float = 1.0
) -> RowTrace:
    """A `Trace` of all parts; each begins at 0 s, and the mix ends with the first part that ends.

    Parts share no blocks. If their block sizes differ, ids are re-blocked to the greatest common divisor; if one names
    full blocks only, so do all. Raises `InputError` for fewer than two parts or an option out of range.
    """
    if len(parts) < 2:
        raise InputError(f"a mix of {len(parts)} part is no mix; give two or more")
    check_window(skip_first, limit, rate_scale)
    merged = _Merged(parts)
    infos = [part.trace.info for part in merged.parts]
    stated = [
        {
            "name": info.name,
            "rate_scale": part.rate_scale,
            "trace_block_size_source": info.trace_block_size_source,
            "workload": info.workload,
        }
        for part, info in zip(merged.parts, infos, strict=True)
    ]
    seed = next((info.workload["seed"] for info in infos if info.workload), 0)
    info = TraceInfo(
        name=" + ".join(info.name for info in infos),
        path=None,
        format="mix",
        timestamp_unit="ns",
        trace_block_size=merged.block_size,
        trace_block_size_source=None if merged.block_size is None else "the parts' greatest common one",
        rate_scale=rate_scale,
        window=Window(skip_first, limit),
        full_blocks_only=merged.full_only,
        links_turns=any(info.links_turns for info in infos),
        records_think_times=any(info.records_think_times for info in infos),
        workload={"resembles": "a mix", "seed": seed, "parameters": {"parts": stated}},
    )
    return RowTrace(info, merged.rows, NANOSECONDS, "the mix")


def is_mix(name: str) -> bool:
    """Whether a workload's name is the description of a mix."""
    return any(mark in name for mark in "+*@")


def open_mix(description: str, *, seed: int = 0, limit: int | None = None, **window: Any) -> RowTrace:
    """A mix by its description: parts joined by `+`, such as `conversation*0.5+code@2+trace.csv`.

    A part is a built-in workload or a trace file; `*F` scales its rate, `@R` sets it in requests a second. Raises
    `InputError` for a description that cannot be read.
    """
    # With a number of requests, built-in parts continue until the mix has them.
    duration_s = None if limit is None else math.inf
    parts: list[MixPart] = []
    for index, piece in enumerate(description.split("+")):
        found = PART.fullmatch(piece.strip())
        name = found.group("name") if found else ""
        if not found or not name:
            raise InputError(
                f"--workload {description}: {piece!r} is no part of a mix; parts are joined by + and look like "
                "conversation, code*2 (twice its rate) or code@1.5 (requests a second)"
            )
        open_part = _opener(name, seed + index * SEED_STEP)
        trace = open_part(duration_s)
        if found.group("rate"):
            measured = part_at_rate(open_part(None), _number(found.group("rate"), description))
            parts.append(MixPart(trace, measured.rate_scale))
        else:
            parts.append(MixPart(trace, _number(found.group("factor") or "1", description)))
    return mix_workloads(parts, limit=limit, **window)


def _opener(name: str, seed: int) -> Callable[[float | None], Trace]:
    if Path(name).exists():
        return lambda _: open_trace(name)
    return lambda duration_s: open_workload(name, seed=seed, duration_s=duration_s)


def _number(text: str, description: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--workload {description}: {text!r} is not a number") from None


class _Merged:
    """The rows of several parts in order of arrival, at one block size."""

    def __init__(self, parts: Sequence[MixPart]) -> None:
        known = [part.trace.info.trace_block_size for part in parts if part.trace.info.trace_block_size is not None]
        self.block_size = math.gcd(*known) if known else None
        self.full_only = any(part.trace.info.full_blocks_only for part in parts)
        self.parts = [attrs.evolve(part, trace=self._at_common_size(part.trace)) for part in parts]

    def rows(self, info: TraceInfo) -> Iterator[Row]:
        """The parts' rows; at the end `info` says what was read and which part ended first."""
        try:
            yield from self._merged_rows(info)
        finally:
            info.made_from = [part.trace.info.origin() for part in self.parts if part.trace.info.path is not None]

    def _merged_rows(self, info: TraceInfo) -> Iterator[Row]:
        streams = [iter(part.trace) for part in self.parts]
        waiting = [self._due(index, next(stream)) for index, stream in enumerate(streams)]
        heapify(waiting)
        place, end_ns = 0, math.inf
        while waiting and waiting[0][0] <= end_ns:
            due_ns, index, request = waiting[0]
            place += 1
            yield self._row(place, due_ns, index, request)
            following = next(streams[index], None)
            if following is not None:
                heapreplace(waiting, self._due(index, following))
                continue
            heappop(waiting)
            if end_ns == math.inf:
                end_ns, ended = due_ns, self.parts[index].trace.info.name
                info.about = (
                    f"the mix ends at {due_ns / NANOSECONDS:,.0f} s with the first of its parts that ends, {ended}"
                )

    def _due(self, index: int, request: TraceRequest) -> tuple[int, int, TraceRequest]:
        return round(request.arrival_s / self.parts[index].rate_scale * NANOSECONDS), index, request

    def _row(self, place: int, due_ns: int, index: int, request: TraceRequest) -> Row:
        ids = request.hash_ids
        if ids is not None:
            if self.full_only and self.block_size is not None:
                ids = ids[: request.input_length // self.block_size]
            num_parts = len(self.parts)
            ids = tuple(hash_id * num_parts + index for hash_id in ids)
        turn = self._turn(index, request)
        return place, due_ns, request.input_length, request.output_length, ids, turn, request.priority

    def _turn(self, index: int, request: TraceRequest) -> TurnRecord | None:
        if request.turn is None:
            return None
        part = self.parts[index]
        turn = request.turn.at_rate(part.rate_scale)
        return TurnRecord(
            key=(index, request.place),
            after=tuple((index, place) for place in turn.waits_for),
            session=f"{part.trace.info.name}/{turn.session}",
            number=turn.number,
            think_s=turn.think_s,
            keeps_own_gap=turn.think_s is None,
            answered_s=turn.answered_s,
            num_waiting=0 if turn.is_last else None,
        )

    def _at_common_size(self, trace: Trace) -> Trace:
        own = trace.info.trace_block_size
        return trace if own is None or own == self.block_size else ReblockedTrace(trace, self.block_size or own)
