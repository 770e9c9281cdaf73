"""Several engines under one clock: each with its own ledger, a router in front of them."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import simpy

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.events import Key
from ...core.types import Request
from ..engine.engine import NANOSECONDS
from ..engine.replay import ReplayReport, traced_request
from ..traces.trace import TraceRequest
from .arrivals import FleetArrivals
from .engine import EngineParts, EngineRole, FleetEngine, start_engine
from .report import ReplicaRun, fleet_report
from .routing import ReplicaView, Routed, Router

# How the engines of a fleet are told apart: pool, server and data-parallel rank.


@attrs.frozen
class EngineName:
    """One engine.

    Attributes:
        replica: the server, from 0 in its pool.
        data_parallel_rank: which of the server's ranks.
        pool: "prefill" or "decode" in a disaggregated fleet, else empty.
    """

    replica: int
    data_parallel_rank: int = 0
    pool: str = ""

    def __str__(self) -> str:
        """`prefill 1.3`; the rank only where it is not the first."""
        number = f"{self.replica}.{self.data_parallel_rank}" if self.data_parallel_rank else f"{self.replica}"
        return f"{self.pool} {number}" if self.pool else number

    def labels(self) -> dict[str, str]:
        """As a Prometheus server that scrapes all servers has them: the rank is vLLM's label `engine`."""
        return {"engine": str(self.data_parallel_rank), "instance": f"{self.pool or 'replica'}-{self.replica}"}


def engine_names(num_replicas: int, data_parallel_size: int, pool: str = "") -> list[EngineName]:
    """Every rank of every server, in order."""
    ranks = range(data_parallel_size)
    return [EngineName(replica, rank, pool) for replica in range(num_replicas) for rank in ranks]


__all__ = ["EngineParts", "Fleet", "FleetShape", "replay_fleet"]


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise InputError(f"{attribute.name} is {value}; it must be at least 1")


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number of seconds, 0 or more")


@attrs.frozen(kw_only=True)
class FleetShape:
    """How many engines there are, and how late a router hears of them.

    Attributes:
        num_replicas: servers.
        data_parallel_size: ranks of each server, every one with a ledger of its own. The router sees each rank, as KV
            events name it (`data_parallel_rank`), and sends requests to ranks.
        event_delay_s: from an engine's commit to the router's knowing of it.
    """

    num_replicas: int = attrs.field(validator=_at_least_one)
    data_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    event_delay_s: float = attrs.field(default=0.0, validator=_not_negative)

    @property
    def num_engines(self) -> int:
        """Ledgers: ranks of all replicas."""
        return self.num_replicas * self.data_parallel_size

    @property
    def engine_names(self) -> list[EngineName]:
        """Of all engines, in the order of their indices."""
        return engine_names(self.num_replicas, self.data_parallel_size)


class Fleet:
    """Engines as SimPy processes in one environment, and a router that arrivals go through."""

    def __init__(self, shape: FleetShape, parts: EngineParts, router: Router, trace_block_size: int | None) -> None:
        self.shape = shape
        self.router = router
        self.env = simpy.Environment()
        self.arrivals = FleetArrivals(self.env, self._route)
        self._allocator = parts.allocator
        self._trace_block_size = trace_block_size
        self._prompts = PromptKeys(parts.allocator)
        self._engines: list[FleetEngine] = []
        for index in range(shape.num_engines):
            replica, rank = divmod(index, shape.data_parallel_size)
            started = start_engine(
                self.env,
                parts,
                EngineRole(index=index, replica=replica, data_parallel_rank=rank),
                event_delay_s=shape.event_delay_s,
                next_reached_ns=self.arrivals.next_arrival_ns,
                on_ended=self.arrivals.ended,
            )
            self._engines.append(started)
        self.views: list[ReplicaView] = [engine.view for engine in self._engines]
        self.runs: list[ReplicaRun] = [engine.run for engine in self._engines]

    def run(
        self,
        trace: Iterable[TraceRequest],
        on_progress: Callable[[int], None] | None = None,
        closed_loop: bool | None = False,
    ) -> None:
        """Serve every request of the trace to its end."""
        block_size, trace_block_size = self._allocator.hash_block_size, self._trace_block_size
        self.arrivals.start(
            trace,
            lambda row, ordinal, now: traced_request(row, ordinal, now, block_size, trace_block_size),
            closed_loop,
            on_progress or (lambda count: None),
        )
        self.env.run()

    def _route(self, request: Request, session: str | None) -> None:
        for view in self.views:
            view.arrive()
        chosen = self.router.choose(self._prompts.routed(request, session), self.views)
        # A router that keeps its own books knows of what it sent before the replica has answered.
        self.views[chosen].sent(request)
        self._engines[chosen].engine.submit(request)


class PromptKeys:
    """What a router reads of a prompt: its keys in the group that replica views follow."""

    def __init__(self, allocator: AllocatorConfig) -> None:
        whole = [kind for kind in allocator.groups if kind.needs_whole_prefix]
        self._block_size = (whole or list(allocator.groups))[0].block_size
        self._per_block = self._block_size // allocator.hash_block_size
        self._enabled = allocator.enable_caching

    def routed(self, request: Request, session: str | None) -> Routed:
        """The request as a router sees it."""
        return Routed(request=request, keys=self._keys(request), block_size=self._block_size, session=session)

    def _keys(self, request: Request) -> Sequence[Key]:
        """Keys of the complete prompt blocks that a hit could cover: at least one token is always computed."""
        if request.keys is None or not self._enabled:
            return ()
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        keys = request.keys.keys(0, num_blocks * self._per_block)
        return keys if self._per_block == 1 else keys[self._per_block - 1 :: self._per_block]


def replay_fleet(
    trace: Iterable[TraceRequest],
    *,
    shape: FleetShape,
    parts: EngineParts,
    router: Router,
    trace_block_size: int | None,
    closed_loop: bool | None = False,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Run every request of a trace through a router and the engines behind it, until each has ended.

    The figures are those of `replay`, over all engines; `report.replicas` holds each engine's own.

    Args:
        trace: rows in order of arrival; read once, never held.
        shape: how many engines.
        parts: what each is made of.
        router: chooses an engine for each request.
        trace_block_size: tokens an id of the trace stands for; None where it has none.
        closed_loop: whether a session's next turn waits for the answer before it, or comes at its recorded time. None:
            closed where the trace says that it records think times.
        on_progress: called with the number of requests routed so far.

    Raises:
        InputError: a closed loop asked of a trace that links no turns.
    """
    fleet = Fleet(shape, parts, router, trace_block_size)
    started = time.perf_counter()
    fleet.run(trace, on_progress, closed_loop)
    wall_seconds = time.perf_counter() - started
    assumptions = {
        "num_replicas": shape.num_replicas,
        "data_parallel_size": shape.data_parallel_size,
        **router.assumptions(),
        "event_delay_s": shape.event_delay_s,
        **parts_assumptions(parts),
        **fleet.arrivals.assumptions(),
        **parts.latency.assumptions(),
    }
    return fleet_report(fleet.runs, assumptions, fleet.arrivals.last_ended_ns / NANOSECONDS, wall_seconds)


def parts_assumptions(parts: EngineParts) -> dict[str, Any]:
    """What every engine rests on, but for its latency model."""
    drafts = parts.drafts_of(0)
    return {
        **_tier_assumptions(parts),
        "async_scheduling": parts.async_scheduling,
        **(drafts.assumptions() if drafts is not None else {}),
    }


def _tier_assumptions(parts: EngineParts) -> dict[str, Any]:
    if not parts.tiers:
        return {}
    return {
        "tiers": [
            f"{tier.name}: {tier.num_blocks:,} blocks, "
            + (
                "copies take no time"
                if tier.bytes_per_s == float("inf")
                else f"{tier.bytes_per_s / 1e9:g} GB/s each way"
            )
            for tier in parts.tiers
        ],
        "tier_bytes_per_block": parts.tier_bytes_per_block,
        "tier_copies": "a step waits for what it promotes and for the write-back of what it overwrites, side by side; "
        "copies between tiers delay nothing",
    }
