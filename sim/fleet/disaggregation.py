"""Prefill on some engines, decode on others: each request's keys and values are copied from one to the other.

A request is prefilled with `max_tokens` 1. When that has finished, a decode engine is chosen for it; the request waits
for room in that engine's pool, holds its blocks there while they are copied in, and decodes. The prefill engine keeps
its blocks until the copy has ended, as vLLM's NIXL connector does, which pulls. (That connector also releases them
after a time limit; there is none here.) Blocks that the decode engine finds in its own prefix cache are not copied.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
import numpy as np
import simpy
from numpy.typing import NDArray

from ...core.errors import DoesNotFitError
from ...core.events import Commit, RowsReleased
from ...core.types import Request
from ..engine.arrivals import TraceArrivals
from ..engine.distributions import QuantileSketch
from ..engine.engine import MAX_REJECTIONS_KEPT, NANOSECONDS
from ..engine.metrics import Recorder, RequestRecord, RequestTimes
from ..engine.replay import ReplayReport
from ..figures import at_least_one, not_negative
from ..traces.trace import TraceRequest
from .fleet import (
    Dispatcher,
    EngineName,
    EngineParts,
    FleetEngine,
    engine_names,
    fleet_report,
    start_engine,
    summed_stats,
)
from .links import KVLinks, TransferModel
from .routing import Router

FIRST_TOKENS = ("prefill", "decode")
# Block-table rows per running request: requests whose blocks are being copied need rows too.
ROWS_PER_SEQUENCE = 4


class PrefillRecorder(Recorder):
    """Measures a prefill engine; passes on the times of each request that continues elsewhere, not counting its end."""

    def __init__(
        self,
        *watched: Any,
        goes_on: Callable[[Request], bool],
        hand_over: Callable[[Request, RequestTimes], None],
        counts_tokens: bool,
    ) -> None:
        """Watch a run, given the arguments of `Recorder`.

        `goes_on` says whether a request that has its token continues elsewhere, `hand_over` is called with such a
        request and its times, and `counts_tokens` says whether the client gets the token.
        """
        super().__init__(*watched)
        self._goes_on = goes_on
        self._hand_over = hand_over
        self._counts_tokens = counts_tokens
        # Requests that continue elsewhere; their blocks, and so their rows, stay here until they have been read.
        self._gone_on: set[str] = set()

    def apply(self, commit: Commit) -> None:
        """As `Recorder`; also forget a request that went on elsewhere when its row is released."""
        super().apply(commit)
        for event in commit.events:
            if type(event) is RowsReleased:
                for request_id in self._gone_on.intersection(event.requests):
                    self._gone_on.remove(request_id)
                    del self._away[request_id]

    def _tokens_produced(self, rows: NDArray[np.int64], now: int) -> None:
        if self._counts_tokens:
            super()._tokens_produced(rows, now)

    def _finished(self, row: int, request: Request, now: int) -> None:
        if not self._goes_on(request):
            super()._finished(row, request, now)
            return
        self._gone_on.add(request.request_id)
        self._hand_over(request, self._times_in(row))


@attrs.frozen(kw_only=True)
class DisaggregatedShape:
    """The number of engines in each pool, and who produces the first token; otherwise as `FleetShape`.

    Every rank of a server has its own ledger and links. With `first_token_from` "prefill", the prefill engine's token
    is the client's first, and the decode engine continues with the second; with "decode", the client gets tokens from
    the decode engine only, which computes the prompt's last token again for the first one (vLLM's NIXL connector behind
    its example proxy).
    """

    num_prefill_replicas: int = attrs.field(validator=at_least_one)
    num_decode_replicas: int = attrs.field(validator=at_least_one)
    data_parallel_size: int = attrs.field(default=1, validator=at_least_one)
    event_delay_s: float = attrs.field(default=0.0, validator=not_negative)
    first_token_from: str = attrs.field(default="prefill", validator=attrs.validators.in_(FIRST_TOKENS))

    @property
    def engine_names(self) -> list[EngineName]:
        """Names of all engines, by index."""
        ranks = self.data_parallel_size
        return [
            *engine_names(self.num_prefill_replicas, ranks, "prefill"),
            *engine_names(self.num_decode_replicas, ranks, "decode"),
        ]


@attrs.define(eq=False)
class _Handover:
    """A request between its arrival and its end on a decode engine."""

    request: Request
    session: str | None
    source: int
    prefill: Request
    times: RequestTimes | None = None
    prefilled_ns: int = 0
    begun_ns: int = 0


class _RemotePrompts:
    """The `RemoteTokens` of one decode engine."""

    def __init__(self, fleet: "DisaggregatedFleet", target: int) -> None:
        self._fleet = fleet
        self._target = target

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        """The rest of the prompt, without its last token if that is computed again."""
        return max(min(request.num_prompt_tokens, request.num_tokens - 1) - num_hit_tokens, 0)

    def admitted(self, request: Request, num_tokens: int) -> None:
        """The request's blocks are allocated: copy the tokens."""
        self._fleet.admitted_for_decode(self._target, request, num_tokens)


class DisaggregatedFleet:
    """Two pools of engines in one environment, a router in front of each, and the links between them."""

    def __init__(
        self,
        shape: DisaggregatedShape,
        parts: EngineParts,
        transfer: TransferModel,
        *,
        prefill_router: Router,
        decode_router: Router,
        trace_block_size: int | None,
    ) -> None:
        self.shape = shape
        self.env = simpy.Environment()
        self.arrivals = TraceArrivals(
            self.env,
            self._route,
            parts.allocator.hash_block_size,
            trace_block_size,
            looks_ahead=parts.allocator.num_lookahead_tokens > 0,
            http_ns=round(parts.http_s * NANOSECONDS),
        )
        self.links = KVLinks(self.env, transfer)
        self.transfer_ns = QuantileSketch()
        self.wait_ns = QuantileSketch()
        self.num_transferred_tokens = 0
        self.num_handed_over = 0
        self.num_refused = 0
        self.rejections: list[str] = []
        self._parts = attrs.evolve(
            parts,
            allocator=attrs.evolve(parts.allocator, max_num_reqs=ROWS_PER_SEQUENCE * parts.allocator.max_num_reqs),
        )
        self._prefill_dispatcher = Dispatcher(prefill_router, parts.allocator)
        self._decode_dispatcher = Dispatcher(decode_router, parts.allocator)
        self._handovers: dict[str, _Handover] = {}
        names = shape.engine_names
        num_prefill = shape.num_prefill_replicas * shape.data_parallel_size
        self.prefill = [self._start_prefill(index, name) for index, name in enumerate(names[:num_prefill])]
        self.decode = [self._start_decode(index, name) for index, name in enumerate(names[num_prefill:])]
        self.engines = [*self.prefill, *self.decode]
        self._prefill_views = [engine.view for engine in self.prefill]
        self._decode_views = [engine.view for engine in self.decode]

    def run(
        self,
        trace: Iterable[TraceRequest],
        on_progress: Callable[[int], None] | None = None,
        closed_loop: bool | None = False,
    ) -> float:
        """Serve every request of the trace to its end; return the wall seconds that it took."""
        return self.arrivals.run(trace, closed_loop, on_progress)

    # -- engines -----------------------------------------------------------------------------------------------------

    def _start_prefill(self, index: int, name: EngineName) -> FleetEngine:
        make_recorder = partial(
            PrefillRecorder,
            goes_on=self._is_handed_over,
            hand_over=self._prefilled,
            counts_tokens=self.shape.first_token_from == "prefill",
        )
        return start_engine(
            self.env,
            self._parts,
            index,
            name,
            event_delay_s=self.shape.event_delay_s,
            next_reached_ns=self.arrivals.next_arrival_ns,
            on_ended=self._ended_on_prefill,
            keeps_blocks_of=self._is_handed_over,
            make_recorder=make_recorder,
        )

    def _start_decode(self, index: int, name: EngineName) -> FleetEngine:
        place = len(self.prefill) + index
        # Only prefill engines have tiers: everything that a decode engine lacks is copied from one of them.
        parts = attrs.evolve(
            self._parts,
            on_finished=partial(self._decoded, self._parts.finished_on(place)),
            on_finished_on=None,
            tiers=(),
            tier_bytes_per_block=None,
        )
        return start_engine(
            self.env,
            parts,
            place,
            name,
            event_delay_s=self.shape.event_delay_s,
            next_reached_ns=partial(self._decode_reached_ns, index),
            on_ended=self._ended_on_decode,
            remote=_RemotePrompts(self, index),
        )

    def _decode_reached_ns(self, index: int) -> float:
        """The end of a prompt, the end of a copy, or a place that becomes free on another engine and leads to both."""
        if self.arrivals.is_closed_loop:
            return self.env.peek()
        others = [one.engine for place, one in enumerate(self.decode) if place != index and one.engine.may_admit]
        return min(
            self.arrivals.next_arrival_ns(),
            self.links.earliest_end_ns(),
            *(engine.next_move_ns for engine in (*(one.engine for one in self.prefill), *others)),
        )

    # -- the life of a request ---------------------------------------------------------------------------------------

    def _is_handed_over(self, request: Request) -> bool:
        return request.request_id in self._handovers

    def _route(self, request: Request, session: str | None) -> None:
        try:
            self.decode[0].scheduler.check_fits(request)
        except DoesNotFitError as error:
            self.num_refused += 1
            if len(self.rejections) < MAX_REJECTIONS_KEPT:
                self.rejections.append(str(error))
            self.arrivals.ended(request)
            return
        chosen = self._prefill_dispatcher.choose(request, session, self._prefill_views)
        prefill = attrs.evolve(request, max_tokens=1)
        if request.max_tokens > 1 or self.shape.first_token_from == "decode":
            self._handovers[request.request_id] = _Handover(request, session, chosen, prefill)
        self._prefill_views[chosen].sent(prefill)
        self.prefill[chosen].engine.submit(prefill)

    def _ended_on_prefill(self, prefill: Request) -> None:
        """The request was refused, its first token was its only one, or it continues on a decode engine."""
        handover = self._handovers.get(prefill.request_id)
        if handover is None or not prefill.num_output_tokens:
            self._handovers.pop(prefill.request_id, None)
            self.arrivals.ended(prefill)
            return
        request = handover.request
        self.num_handed_over += 1
        chosen = self._decode_dispatcher.choose(request, handover.session, self._decode_views)
        self._decode_views[chosen].sent(request)
        target = self.decode[chosen]
        if handover.times is not None:
            target.recorder.resume(request.request_id, handover.times)
        target.engine.submit(request)

    def _prefilled(self, prefill: Request, times: RequestTimes) -> None:
        """The prefill engine's recorder calls this right before `_ended_on_prefill`."""
        handover = self._handovers[prefill.request_id]
        handover.prefilled_ns = int(self.env.now)
        handover.request.num_output_tokens = 1 if self.shape.first_token_from == "prefill" else 0
        handover.times = times

    def admitted_for_decode(self, target: int, request: Request, num_tokens: int) -> None:
        """A decode engine allocated the request's blocks: copy those that were not cached, then release the source."""
        handover = self._handovers[request.request_id]
        handover.begun_ns = int(self.env.now)
        self.wait_ns.add(handover.begun_ns - handover.prefilled_ns)
        if not num_tokens:
            self.links.start(handover.source, target, 0, partial(self._release_source, handover))
            return
        self.num_transferred_tokens += num_tokens
        num_blocks = self._num_blocks_to_copy(target, request, num_tokens)
        self.links.start(handover.source, target, num_blocks, partial(self._copied, target, handover))

    def _num_blocks_to_copy(self, target: int, request: Request, num_tokens: int) -> int:
        """Whole blocks of every group, as connectors copy them, without blocks that a window has dropped."""
        state = self.decode[target].scheduler.allocator.state
        row = state.row_of[request.request_id]
        end = state.placed[row]
        count = 0
        for table in state.tables:
            first, last = (end - num_tokens) // table.block_size, -(-end // table.block_size)
            count += sum(1 for block in table.blocks(row)[first:last] if block)
        return count

    def _copied(self, target: int, handover: _Handover) -> None:
        self.transfer_ns.add(int(self.env.now) - handover.begun_ns)
        self.decode[target].engine.received(handover.request.request_id)
        self._release_source(handover)

    def _release_source(self, handover: _Handover) -> None:
        """The prefill engine's blocks were read, or are not needed."""
        self.prefill[handover.source].engine.sent(handover.request.request_id)

    def _ended_on_decode(self, request: Request) -> None:
        self._handovers.pop(request.request_id)
        self.arrivals.ended(request)

    def _decoded(self, on_finished: Callable[[RequestRecord], None] | None, record: RequestRecord) -> None:
        """Report the whole request: cached tokens are those found before its prompt was computed, not copied."""
        if on_finished is not None:
            prefill = self._handovers[record.request_id].prefill
            num_preemptions = record.num_preemptions + prefill.num_preemptions
            cached = prefill.num_cached_tokens or 0
            on_finished(attrs.evolve(record, num_cached_tokens=cached, num_preemptions=num_preemptions))


def replay_disaggregated(
    trace: Iterable[TraceRequest],
    *,
    shape: DisaggregatedShape,
    parts: EngineParts,
    transfer: TransferModel,
    prefill_router: Router,
    decode_router: Router,
    trace_block_size: int | None,
    closed_loop: bool | None = False,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Run every request of a trace through prefill engines, links and decode engines, until each has ended.

    The figures are those of `replay` over all engines. TTFT is the client's: it includes the transfer if the first
    token comes from decode; if it comes from prefill, the first gap between tokens (ITL, and so TPOT) includes it.
    `prefix_cache` counts the prefill engines' lookups; `kv_transfer` counts what was copied, and what was found on the
    decode engines instead.

    Arguments and errors are those of `replay_fleet`. `prefill_router` chooses a prefill engine at each arrival, and
    `decode_router` a decode engine when a prompt has been computed. Only prefill engines have the tiers of `parts`.
    """
    fleet = DisaggregatedFleet(
        shape,
        parts,
        transfer,
        prefill_router=prefill_router,
        decode_router=decode_router,
        trace_block_size=trace_block_size,
    )
    wall_seconds = fleet.run(trace, on_progress, closed_loop)
    decode_routing = {f"decode_{name}": value for name, value in decode_router.assumptions().items()}
    assumptions = {
        "num_prefill_replicas": shape.num_prefill_replicas,
        "num_decode_replicas": shape.num_decode_replicas,
        "data_parallel_size": shape.data_parallel_size,
        **prefill_router.assumptions(),
        **decode_routing,
        "event_delay_s": shape.event_delay_s,
        **transfer.assumptions(),
        "kv_transfer_blocks": "held on both sides while they are copied; whole blocks; none of what decode finds",
        "first_token_from": shape.first_token_from,
        **parts.assumptions(),
        **fleet.arrivals.assumptions(),
        **parts.latency.assumptions(),
    }
    return _report(fleet, assumptions, wall_seconds)


def _report(fleet: DisaggregatedFleet, assumptions: dict[str, object], wall_seconds: float) -> ReplayReport:
    """Count each request once, although two engines served it; lookups are those of the prefill engines."""
    everywhere = summed_stats([engine.scheduler.stats for engine in fleet.engines])
    prefill = summed_stats([engine.scheduler.stats for engine in fleet.prefill])
    decode = summed_stats([engine.scheduler.stats for engine in fleet.decode])
    once = attrs.evolve(
        everywhere,
        num_submitted=prefill.num_submitted,
        num_finished=everywhere.num_finished - fleet.num_handed_over,
        num_rejected=prefill.num_rejected + fleet.num_refused,
        prefix_queries_tokens=prefill.prefix_queries_tokens,
        prefix_hits_tokens=prefill.prefix_hits_tokens,
        external_hits_tokens=prefill.external_hits_tokens,
    )
    report = fleet_report(fleet.engines, assumptions, fleet.arrivals.last_ended_ns / NANOSECONDS, wall_seconds, once)
    report.rejections = [*fleet.rejections, *report.rejections][:MAX_REJECTIONS_KEPT]
    report.kv_transfer = {
        "transfers": fleet.transfer_ns.count,
        "handed_over": fleet.num_handed_over,
        "transferred_tokens": fleet.num_transferred_tokens,
        "found_tokens": decode.prefix_hits_tokens,
        "transferred_bytes": round(fleet.links.num_bytes),
        "transfer_s": fleet.transfer_ns.summary(NANOSECONDS),
        "wait_for_blocks_s": fleet.wait_ns.summary(NANOSECONDS),
    }
    return report
