"""From the options of `kvledger replay` to the parts of an engine; shared by the commands that run several."""

from collections.abc import Mapping
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.quantities import parse_bytes
from ...core.scheduler.config import SchedulerConfig
from ...core.types import LatencyModel
from ..engine.drafts import DraftAcceptance
from ..fleet.fleet import EngineParts
from ..traces import Trace
from .replay_setup import LatencyOptions, Pool, PoolOptions, make_latency, make_pool
from .trace_source import open_trace_or_workload

OF_THE_TRACE = (
    "trace_format",
    "timestamp_unit",
    "trace_block_size",
    "tokenizer",
    "request_rate",
    "on_bad_row",
    "skip_first",
    "limit",
    "rate_scale",
)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """What one engine is made of, and where its pool comes from."""

    pool: Pool
    parts: EngineParts


def read_engine(given: Mapping[str, Any]) -> EngineOptions:
    """The engine that the options describe (`given`: option -> value as typed, under the names of `replay`).

    Raises:
        InputError: something is missing, unknown or contradictory.
        DoesNotFitError: the planner's answer is no.
    """
    memory = given["kv_cache_memory_bytes"]
    pool_values = {field.name: given[field.name] for field in attrs.fields(PoolOptions) if field.name in given}
    pool_values["kv_cache_memory_bytes"] = None if memory is None else parse_bytes(memory, "--kv-cache-memory-bytes")
    pool = make_pool(PoolOptions(**pool_values))
    return EngineOptions(pool=pool, parts=_parts(given, pool, _latency(given, pool)))


def open_source(given: Mapping[str, Any], seed: int | None = None) -> Trace:
    """The trace or workload that the options name; `seed` stands in for the one given."""
    seed = given["seed"] if seed is None else seed
    drafted = given.get("draft_acceptance_rate") is not None
    return open_trace_or_workload(
        given["trace"],
        given["workload"],
        fit=given.get("fit"),
        # With drafts the seed has an effect on any trace.
        seed=None if given["trace"] and given["request_rate"] is None and drafted else seed,
        **{name: given[name] for name in OF_THE_TRACE},
    )


def _latency(given: Mapping[str, Any], pool: Pool) -> LatencyModel:
    options = LatencyOptions(**{field.name: given[field.name] for field in attrs.fields(LatencyOptions)})
    return make_latency(options, pool)


def _parts(given: Mapping[str, Any], pool: Pool, latency: LatencyModel) -> EngineParts:
    if (given["preemption_mode"] == "swap") != (given["swap_link_gb_s"] is not None):
        raise InputError("--preemption-mode swap and --swap-link-gb-s go together: copies take time")
    rate, num_drafts = given["draft_acceptance_rate"], given["num_speculative_tokens"]
    if (num_drafts > 0) != (rate is not None):
        raise InputError("--num-speculative-tokens and --draft-acceptance-rate go together; neither has a default")
    seed = given["seed"] or 0
    names = [field.name for field in attrs.fields(SchedulerConfig) if field.name in given]
    return EngineParts(
        allocator=pool.allocator,
        scheduler=SchedulerConfig(**{name: given[name] for name in names}, policy=given["scheduling_policy"]),
        latency=latency,
        # Each engine draws on its own.
        drafts_of=lambda index: None if rate is None else DraftAcceptance(rate, seed + index),
        async_scheduling=given["async_scheduling"],
    )
