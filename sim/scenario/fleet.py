"""Replay a scenario on several engines behind a router, or on prefill and decode engines with tiers behind them."""

import math
from collections.abc import Callable
from typing import Any

import attrs

from ...core.errors import InputError
from ..fleet.disaggregation import FIRST_TOKENS, DisaggregatedShape, replay_disaggregated
from ..fleet.fleet import EngineParts, FleetShape, replay_fleet
from ..fleet.links import SHARINGS, TransferModel
from ..fleet.routing import Router, make_router
from ..fleet.tiers import Tier
from ..traces import Trace
from .engine import Engine, Pool, engine_of
from .options import FLEET, option, options
from .replay import ReplayResult, refuse_if_none_finished
from .results import Table, trace_as_dict
from .scenario import Scenario
from .traffic import open_traffic

DEFAULT_REPLICAS = 2
DEFAULT_DECODE_ROUTING = "least-outstanding-work"


@options
class RoutingOptions:
    """How requests reach the engines of a fleet."""

    routing: str = option("prefix-aware", FLEET, "Router: {routers}.")
    routing_load_weight: float | None = option(
        None, FLEET, "Prefix-aware routing: weight of outstanding prompt tokens; 1 unless given."
    )
    event_delay_ms: float = option(0.0, FLEET, "Delay from an engine's commit until the router knows of it.")

    def router(self) -> Router:
        """A new router."""
        return make_router(self.routing, self.routing_load_weight)

    @property
    def event_delay_s(self) -> float:
        """The delay in seconds."""
        return self.event_delay_ms / 1e3


@options
class FleetOptions(RoutingOptions):
    """The servers of a fleet, the links between them and the tiers behind their pools; None where not given."""

    replicas: int | None = option(None, FLEET, f"Servers of the fleet; {DEFAULT_REPLICAS} unless given.", metavar="N")
    prefill_replicas: int | None = option(
        None, FLEET, "Servers that only compute prompts; with --decode-replicas, instead of --replicas.", metavar="N"
    )
    decode_replicas: int | None = option(
        None, FLEET, "Servers that produce the output tokens; with --prefill-replicas.", metavar="N"
    )
    decode_routing: str | None = option(
        None, FLEET, f"Router of the decode servers; {DEFAULT_DECODE_ROUTING} unless given."
    )
    transfer_gb_s: float | None = option(
        None, FLEET, "Bandwidth in GB/s out of a prefill GPU and into a decode GPU (inf: no time); needed with them."
    )
    transfer_latency_ms: float | None = option(
        None, FLEET, "Time before the first byte of each transfer; 0 unless given."
    )
    transfer_sharing: str | None = option(None, FLEET, "How transfers share a link: fair (unless given) or fifo.")
    transfer_bytes_per_block: int | None = option(
        None, FLEET, "Bytes of a block on one GPU. Unless given: the model's.", unit="bytes"
    )
    first_token_from: str | None = option(
        None, FLEET, "Server that sends the first token: prefill (unless given), or decode, which computes it again."
    )
    host_blocks: int | None = option(
        None, FLEET, "Host memory of each engine for evicted blocks, in blocks.", metavar="BLOCKS"
    )
    host_gb_s: float | None = option(
        None, FLEET, "Bandwidth in GB/s between a GPU and host memory, each way (inf: no time); needed with it."
    )
    ssd_blocks: int | None = option(None, FLEET, "SSD behind the host memory, in blocks.", metavar="BLOCKS")
    ssd_gb_s: float | None = option(None, FLEET, "Bandwidth of the SSD in GB/s (inf: no time); needed with it.")
    tier_bytes_per_block: int | None = option(
        None, FLEET, "Bytes of a block on one GPU. Unless given: the model's.", unit="bytes"
    )

    def __attrs_post_init__(self) -> None:
        if (self.prefill_replicas is None) != (self.decode_replicas is None):
            raise InputError("--prefill-replicas and --decode-replicas go together: a request needs both")
        if self.prefill_replicas is None:
            of_pools = ("decode_routing", "first_token_from", *(n for n in _NAMES if n.startswith("transfer_")))
            for name in of_pools:
                if getattr(self, name) is not None:
                    raise InputError(f"{_spelled(name)} {getattr(self, name)} has no effect without --prefill-replicas")
            return
        if self.replicas is not None:
            raise InputError(
                f"--replicas {self.replicas} and --prefill-replicas {self.prefill_replicas} exclude each other: give "
                "the servers of each pool"
            )
        if self.transfer_gb_s is None:
            raise InputError("--prefill-replicas needs --transfer-gb-s; it has no default (inf: copies take no time)")
        if not self.transfer_gb_s > 0:
            raise InputError(f"--transfer-gb-s is {self.transfer_gb_s}; it must be above 0 (inf: copies take no time)")
        if not 0 <= (self.transfer_latency_ms or 0) < math.inf:
            raise InputError(f"--transfer-latency-ms is {self.transfer_latency_ms}; it must be 0 or more")
        for name, choices in (("transfer_sharing", SHARINGS), ("first_token_from", FIRST_TOKENS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise InputError(f"{_spelled(name)} is {value!r}; it is one of {', '.join(choices)}")

    def shape(self, data_parallel_size: int) -> FleetShape | DisaggregatedShape:
        """How many engines there are in which pools."""
        if self.prefill_replicas is None or self.decode_replicas is None:
            return FleetShape(
                num_replicas=DEFAULT_REPLICAS if self.replicas is None else self.replicas,
                data_parallel_size=data_parallel_size,
                event_delay_s=self.event_delay_s,
            )
        return DisaggregatedShape(
            num_prefill_replicas=self.prefill_replicas,
            num_decode_replicas=self.decode_replicas,
            data_parallel_size=data_parallel_size,
            event_delay_s=self.event_delay_s,
            first_token_from=self.first_token_from or FIRST_TOKENS[0],
        )

    def transfer(self, pool: Pool) -> TransferModel:
        """The links of a disaggregated fleet. Raises InputError: a finite bandwidth, and no bytes to copy."""
        bytes_per_block = self.transfer_bytes_per_block or (pool.plan.bytes_per_block if pool.plan else None)
        if not bytes_per_block and self.transfer_gb_s != math.inf:
            raise InputError(
                f"--transfer-gb-s {self.transfer_gb_s:g} needs the bytes of a block: give --model, or "
                "--transfer-bytes-per-block"
            )
        return TransferModel(
            bytes_per_s=(self.transfer_gb_s or 0) * 1e9,
            latency_s=(self.transfer_latency_ms or 0) / 1e3,
            sharing=self.transfer_sharing or SHARINGS[0],
            bytes_per_block=bytes_per_block,
        )

    def with_tiers(self, engine: Engine) -> EngineParts:
        """The engine's parts with the tiers behind its pool."""
        tiers = self._tiers()
        if not tiers:
            return engine.parts
        plan = engine.pool.plan
        bytes_per_block = self.tier_bytes_per_block or (plan.bytes_per_block if plan else None)
        return attrs.evolve(engine.parts, tiers=tiers, tier_bytes_per_block=bytes_per_block)

    def _tiers(self) -> tuple[Tier, ...]:
        """From the nearest to the farthest.

        Raises InputError: a size without a bandwidth or the other way round, or an SSD without host memory before it.
        """
        out: list[Tier] = []
        for name, blocks, gb_s in (("host", self.host_blocks, self.host_gb_s), ("ssd", self.ssd_blocks, self.ssd_gb_s)):
            if (blocks is None) != (gb_s is None):
                raise InputError(
                    f"--{name}-blocks and --{name}-gb-s go together; neither has a default (--{name}-gb-s inf: copies "
                    "take no time)"
                )
            if blocks is not None and gb_s is not None:
                out.append(Tier(name=name, num_blocks=blocks, bytes_per_s=gb_s * 1e9))
        if self.ssd_blocks is not None and self.host_blocks is None:
            raise InputError("--ssd-blocks needs --host-blocks: what leaves the GPU goes to host memory first")
        if not out and self.tier_bytes_per_block is not None:
            raise InputError(f"--tier-bytes-per-block {self.tier_bytes_per_block} has no effect without --host-blocks")
        return tuple(out)


_NAMES = tuple(field.name for field in attrs.fields(FleetOptions))


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def replay_fleet_scenario(
    scenario: Scenario,
    fleet: FleetOptions | None = None,
    *,
    engine: Engine | None = None,
    trace: Trace | None = None,
    parts_with: Callable[[EngineParts], EngineParts] = lambda parts: parts,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay a scenario's traffic, or `trace`, on a fleet whose servers all run the scenario's engine.

    `parts_with` changes the parts of every engine, for those who listen to the run. `on_progress` is called with the
    number of requests routed so far.

    Raises:
        InputError: something is missing, unknown or contradictory, or the trace is wrong.
        DoesNotFitError: the planner's answer is no, or none of the requests fits.
    """
    fleet = fleet or FleetOptions()
    engine = engine or engine_of(scenario)
    parts = parts_with(fleet.with_tiers(engine))
    router, shape = fleet.router(), fleet.shape(scenario.data_parallel_size)
    source = open_traffic(scenario) if trace is None else trace
    shared: dict[str, Any] = {
        "parts": parts,
        "trace_block_size": source.info.trace_block_size,
        "closed_loop": scenario.closed_loop,
        "on_progress": on_progress,
    }
    if isinstance(shape, DisaggregatedShape):
        report = replay_disaggregated(
            source,
            shape=shape,
            transfer=fleet.transfer(engine.pool),
            prefill_router=router,
            decode_router=make_router(fleet.decode_routing or DEFAULT_DECODE_ROUTING),
            **shared,
        )
    else:
        report = replay_fleet(source, shape=shape, router=router, **shared)
    refuse_if_none_finished(report)
    report.assumptions = {**engine.pool.facts, **report.assumptions}
    return ReplayResult(report=report, trace=trace_as_dict(source.info), requests=Table({}))
