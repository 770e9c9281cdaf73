"""Prefill on some engines, decode on others: each request's keys and values are copied from the one to the other.

A request is prefilled with `max_tokens` 1. When it has finished there, a decode engine is chosen for it; it waits for
room in that engine's pool, holds its blocks there while they are copied in, and decodes. The prefill engine keeps its
blocks until the copy has ended: what vLLM's NIXL connector does, which pulls. (That connector lets go of them after a
time limit as well; there is none here.) What the decode engine finds in its own prefix cache is not copied.
"""

from collections.abc import Callable, Iterable
from functools import partial

import attrs
import numpy as np
import simpy
from numpy.typing import NDArray

from ...core.errors import DoesNotFitError, InputError
from ...core.events import Commit, RowsReleased
from ...core.types import Request
from ..engine.distributions import QuantileSketch, RunHistograms
from ..engine.engine import MAX_REJECTIONS_KEPT
from ..engine.metrics import Recorder, RequestRecord, RequestTimes
from ..engine.replay import traced_request
from ..traces.trace import TraceRequest
from .arrivals import FleetArrivals
from .engine import EngineParts, EngineRole, FleetEngine, start_engine
from .fleet import EngineName, FleetShape, PromptKeys, engine_names
from .links import KVLinks, TransferModel
from .routing import Router

# What a prefill engine measures: requests that go on elsewhere have not finished when they leave it.


class PrefillRecorder(Recorder):
    """Hands on the clocks of each request that goes on, instead of counting its end."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        num_rows: int,
        histograms: RunHistograms | None,
        on_finished: Callable[[RequestRecord], None] | None,
        *,
        goes_on: Callable[[Request], bool],
        hand_over: Callable[[Request, RequestTimes], None],
        counts_tokens: bool,
    ) -> None:
        """Watch a run.

        Args:
            now_ns: the clock to ask.
            num_rows: rows of the block tables.
            histograms: where samples are counted besides; None: nowhere.
            on_finished: given the record of each request that ends here.
            goes_on: whether a request that has its token goes on elsewhere.
            hand_over: given the clocks of such a request.
            counts_tokens: whether the client gets the token.
        """
        super().__init__(now_ns, num_rows, histograms, on_finished)
        self._goes_on = goes_on
        self._hand_over = hand_over
        self._counts_tokens = counts_tokens
        # Gone on elsewhere; their blocks, and so their rows, are kept here until they were read.
        self._gone_on: set[str] = set()

    def apply(self, commit: Commit) -> None:
        """As `Recorder`; a row that was kept for what went on elsewhere is nobody's now."""
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
        self._hand_over(request, RequestTimes(*self._times_in(row)))


FIRST_TOKENS = ("prefill", "decode")
# Rows of the block tables for each place among the running requests: the others hold blocks on their way.
ROWS_PER_SEQUENCE = 4


@attrs.frozen(kw_only=True)
class DisaggregatedShape:
    """How many engines there are of each pool, and who produces the first token.

    Attributes:
        num_prefill_replicas: servers that compute prompts.
        num_decode_replicas: servers that produce the other tokens.
        data_parallel_size: ranks of each server, every one with a ledger and links of its own.
        event_delay_s: from an engine's commit to the routers' knowing of it.
        first_token_from: "prefill": its engine's token is the client's first, and the decode engine goes on with the
            second; "decode": the client hears of the decode engine only, which computes the prompt's last token again
            for the first one (vLLM's NIXL connector behind its example proxy).
    """

    num_prefill_replicas: int
    num_decode_replicas: int
    data_parallel_size: int = 1
    event_delay_s: float = 0.0
    first_token_from: str = attrs.field(default="prefill", validator=attrs.validators.in_(FIRST_TOKENS))

    def __attrs_post_init__(self) -> None:
        for name in ("num_prefill_replicas", "num_decode_replicas"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.pool(self.num_prefill_replicas)

    def pool(self, num_replicas: int) -> FleetShape:
        """One of the two pools as a fleet."""
        return FleetShape(
            num_replicas=num_replicas, data_parallel_size=self.data_parallel_size, event_delay_s=self.event_delay_s
        )

    @property
    def engine_names(self) -> list[EngineName]:
        """Of all engines, in the order of their indices."""
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
        """The rest of the prompt, less its last token where that is computed again."""
        return max(min(request.num_prompt_tokens, request.num_tokens - 1) - num_hit_tokens, 0)

    def admitted(self, request: Request, num_tokens: int) -> None:
        """Its blocks are held: copy."""
        self._fleet.admitted_for_decode(self._target, request, num_tokens)


class DisaggregatedFleet:
    """Two pools of engines in one environment, a router before each, and the links between them."""

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
        self.arrivals = FleetArrivals(self.env, self._route)
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
        self._prefill_router = prefill_router
        self._decode_router = decode_router
        self._trace_block_size = trace_block_size
        self._prompts = PromptKeys(parts.allocator)
        self._handovers: dict[str, _Handover] = {}
        ranks = shape.data_parallel_size
        self.prefill = [self._start_prefill(index) for index in range(shape.num_prefill_replicas * ranks)]
        self.decode = [self._start_decode(index) for index in range(shape.num_decode_replicas * ranks)]
        self.runs = [engine.run for engine in (*self.prefill, *self.decode)]

    def run(
        self,
        trace: Iterable[TraceRequest],
        on_progress: Callable[[int], None] | None = None,
        closed_loop: bool | None = False,
    ) -> None:
        """Serve every request of the trace to its end."""
        block_size, trace_block_size = self._parts.allocator.hash_block_size, self._trace_block_size
        self.arrivals.start(
            trace,
            lambda row, ordinal, now: traced_request(row, ordinal, now, block_size, trace_block_size),
            closed_loop,
            on_progress or (lambda count: None),
        )
        self.env.run()

    # -- engines -----------------------------------------------------------------------------------------------------

    def _start_prefill(self, index: int) -> FleetEngine:
        def make_recorder(now_ns: Callable[[], int], num_rows: int, histograms: RunHistograms | None) -> Recorder:
            return PrefillRecorder(
                now_ns,
                num_rows,
                histograms,
                self._parts.finished_on(index),
                goes_on=self._is_handed_over,
                hand_over=self._prefilled,
                counts_tokens=self.shape.first_token_from == "prefill",
            )

        replica, rank = divmod(index, self.shape.data_parallel_size)
        return start_engine(
            self.env,
            self._parts,
            EngineRole(
                index=index,
                replica=replica,
                data_parallel_rank=rank,
                pool="prefill",
                keeps_blocks_of=self._is_handed_over,
                make_recorder=make_recorder,
            ),
            event_delay_s=self.shape.event_delay_s,
            next_reached_ns=self.arrivals.next_arrival_ns,
            on_ended=self._ended_on_prefill,
        )

    def _start_decode(self, index: int) -> FleetEngine:
        replica, rank = divmod(index, self.shape.data_parallel_size)
        place = self.shape.num_prefill_replicas * self.shape.data_parallel_size + index
        # What keeps evicted blocks is the prefill engines': all that a decode engine lacks is copied from one.
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
            EngineRole(
                index=place,
                replica=replica,
                data_parallel_rank=rank,
                pool="decode",
                remote=_RemotePrompts(self, index),
            ),
            event_delay_s=self.shape.event_delay_s,
            next_reached_ns=partial(self._decode_reached_ns, index),
            on_ended=self._ended_on_decode,
        )

    def _decode_reached_ns(self, index: int) -> float:
        """A prompt that ends, a copy that ends, or, by way of both, a place that becomes free on another engine."""
        if self.arrivals.is_closed_loop:
            return self.env.peek()
        others = [one.engine for place, one in enumerate(self.decode) if place != index and one.engine.may_admit]
        return min(
            self.arrivals.next_arrival_ns(),
            self.links.earliest_end_ns(),
            *(engine.next_move_ns for engine in (*(one.engine for one in self.prefill), *others)),
        )

    # -- the way of a request ----------------------------------------------------------------------------------------

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
        views = [engine.view for engine in self.prefill]
        for view in views:
            view.arrive()
        chosen = self._prefill_router.choose(self._prompts.routed(request, session), views)
        prefill = attrs.evolve(request, max_tokens=1)
        if request.max_tokens > 1 or self.shape.first_token_from == "decode":
            self._handovers[request.request_id] = _Handover(request, session, chosen, prefill)
        views[chosen].sent(prefill)
        self.prefill[chosen].engine.submit(prefill)

    def _ended_on_prefill(self, prefill: Request) -> None:
        """Its first token was the only one, it was refused, or a decode engine goes on with it."""
        handover = self._handovers.get(prefill.request_id)
        if handover is None or not prefill.num_output_tokens:
            self._handovers.pop(prefill.request_id, None)
            self.arrivals.ended(prefill)
            return
        request = handover.request
        self.num_handed_over += 1
        views = [engine.view for engine in self.decode]
        for view in views:
            view.arrive()
        chosen = self._decode_router.choose(self._prompts.routed(request, handover.session), views)
        views[chosen].sent(request)
        target = self.decode[chosen]
        if handover.times is not None:
            target.recorder.resume(request.request_id, handover.times)
        target.engine.submit(request)

    def _prefilled(self, prefill: Request, times: RequestTimes) -> None:
        """Told by the prefill engine's recorder, right before `_ended_on_prefill`."""
        handover = self._handovers[prefill.request_id]
        handover.prefilled_ns = int(self.env.now)
        handover.request.num_output_tokens = 1 if self.shape.first_token_from == "prefill" else 0
        handover.times = times

    def admitted_for_decode(self, target: int, request: Request, num_tokens: int) -> None:
        """A decode engine holds the request's blocks: copy those that it did not find, or let the others go."""
        handover = self._handovers[request.request_id]
        handover.begun_ns = int(self.env.now)
        self.wait_ns.add(handover.begun_ns - handover.prefilled_ns)
        if not num_tokens:
            self.links.start(handover.source, target, 0, partial(self._let_go, handover))
            return
        self.num_transferred_tokens += num_tokens
        num_blocks = self._num_blocks_to_copy(target, request, num_tokens)
        self.links.start(handover.source, target, num_blocks, partial(self._copied, target, handover))

    def _num_blocks_to_copy(self, target: int, request: Request, num_tokens: int) -> int:
        """Whole blocks, as connectors copy them, of every group; none for what a window has left behind."""
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
        self._let_go(handover)

    def _let_go(self, handover: _Handover) -> None:
        """The prefill engine's blocks were read, or are not needed."""
        self.prefill[handover.source].engine.sent(handover.request.request_id)

    def _ended_on_decode(self, request: Request) -> None:
        self._handovers.pop(request.request_id)
        self.arrivals.ended(request)

    def _decoded(self, tell: Callable[[RequestRecord], None] | None, record: RequestRecord) -> None:
        """The record of a whole request: what was found before its prompt was computed, not before it was copied."""
        if tell is None:
            return
        prefill = self._handovers[record.request_id].prefill
        num_preemptions = record.num_preemptions + prefill.num_preemptions
        cached = prefill.num_cached_tokens or 0
        tell(attrs.evolve(record, num_cached_tokens=cached, num_preemptions=num_preemptions))
