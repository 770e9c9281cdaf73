"""A trace on prefill and decode engines: the run, and its figures with each request counted once."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from ..engine.engine import MAX_REJECTIONS_KEPT, NANOSECONDS
from ..engine.replay import ReplayReport
from ..traces.trace import TraceRequest
from .disaggregation import DisaggregatedFleet, DisaggregatedShape
from .engine import EngineParts
from .fleet import parts_assumptions
from .links import TransferModel
from .report import fleet_report, summed_stats
from .routing import Router


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

    The figures are those of `replay` over all engines. TTFT is the client's: it holds the transfer where the first
    token comes from decode; where it comes from prefill, the first gap between tokens (ITL, and so TPOT) holds it.
    `prefix_cache` counts the prefill engines' lookups; `kv_transfer` says what was copied, and what was found on the
    decode engines instead.

    Args:
        trace: rows in order of arrival; read once, never held.
        shape: how many engines of each pool.
        parts: what each is made of; tiers stand behind the prefill engines' pools.
        transfer: the links.
        prefill_router: chooses a prefill engine at each arrival.
        decode_router: chooses a decode engine when a prompt has been computed.
        trace_block_size: tokens an id of the trace stands for; None where it has none.
        closed_loop: as for `replay_fleet`.
        on_progress: called with the number of requests routed so far.

    Raises:
        InputError: a closed loop asked of a trace that links no turns.
    """
    fleet = DisaggregatedFleet(
        shape,
        parts,
        transfer,
        prefill_router=prefill_router,
        decode_router=decode_router,
        trace_block_size=trace_block_size,
    )
    started = time.perf_counter()
    fleet.run(trace, on_progress, closed_loop)
    wall_seconds = time.perf_counter() - started
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
        **parts_assumptions(parts),
        **fleet.arrivals.assumptions(),
        **parts.latency.assumptions(),
    }
    return _report(fleet, assumptions, wall_seconds)


def _report(fleet: DisaggregatedFleet, assumptions: dict[str, Any], wall_seconds: float) -> ReplayReport:
    """Each request counts once, although two engines had it; lookups are the prefill engines'."""
    everywhere = summed_stats([run.scheduler.stats for run in fleet.runs])
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
    report = fleet_report(fleet.runs, assumptions, fleet.arrivals.last_ended_ns / NANOSECONDS, wall_seconds, once)
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
