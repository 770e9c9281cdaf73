"""The engine that a replay runs on: from the options to pool, groups and latency model, nothing filled in silently."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.deployment.deployment import DEFAULT_BLOCK_SIZE, Deployment
from ...core.deployment.plan import DeploymentPlan, plan_deployment
from ...core.errors import InputError
from ...core.models.geometry import load_geometry
from ...core.models.weights import scheme_by_name
from ...core.planner.groups import allocator_groups
from ...core.planner.verdict import hybrid_waste
from ...core.types import LatencyModel
from ..latency.devices import Device, find_device
from ..latency.linear import LinearLatency, SwapLatency
from ..latency.roofline import RooflineLatency
from ..latency.table import TableLatency

# From a plan to an engine: the pool with its groups, and the step times of the model on its device.

# vLLM's engine keeps, of windowed groups, only the window before a request's replay boundaries.
ENGINE_RETENTION = 0


def allocator_of_plan(plan: DeploymentPlan, *, watermark_blocks: int = 0, eviction: str = "lru") -> AllocatorConfig:
    """The pool of a plan that fits, with the planner's groups.

    Raises:
        InputError: a cache of the model has no rules for the allocator.
    """
    deployment, pool = plan.deployment, plan.pool
    return AllocatorConfig(
        num_blocks=plan.num_blocks,
        groups=allocator_groups(pool.configs()[0], deployment.decode_context_parallel_size),
        max_model_len=pool.max_model_len,
        max_num_reqs=deployment.max_num_seqs,
        enable_caching=deployment.enable_prefix_caching,
        retention_interval=ENGINE_RETENTION,
        max_in_flight_tokens=deployment.max_concurrent_batches * deployment.max_num_batched_tokens,
        watermark_blocks=watermark_blocks,
        hash_block_size=pool.hash_block_size,
        scheduler_block_size=pool.scheduler_block_size,
        eviction=eviction,
        key_algorithm="trace ids",
    )


def roofline_of_plan(plan: DeploymentPlan, device: Device, weights_dtype: str = "auto") -> RooflineLatency:
    """The step times of a planned engine.

    Args:
        plan: model, ranks, limits.
        device: datasheet figures of each GPU.
        weights_dtype: a quantisation scheme, a dtype, or `auto`: what the model's config says.

    Raises:
        InputError: what the model stores or computes is not known, or does not divide over the ranks.
    """
    deployment = plan.deployment
    return RooflineLatency.for_model(
        deployment.geometry,
        device,
        max_num_seqs=deployment.max_num_seqs,
        tensor_parallel_size=deployment.tensor_parallel_size,
        pipeline_parallel_size=deployment.pipeline_parallel_size,
        weights_dtype=weights_dtype,
        kv_cache_dtype=deployment.cache_dtype,
        enforce_eager=deployment.enforce_eager,
    )


# No published model has a longer context; a pool without a model serves requests up to this length.
LONGEST_CONTEXT_TOKENS = 1 << 20


@attrs.frozen(kw_only=True)
class PoolOptions:
    """What decides the pool, as typed; None where an option was not given.

    Either `num_gpu_blocks_override` alone (one full-attention group), or a model: with a device the pool is planned,
    with an override it has that many blocks of the model's groups.
    """

    model: str | None = None
    gpu: str | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    watermark_blocks: int = 0
    eviction: str = "lru"


@attrs.frozen(kw_only=True)
class Pool:
    """A pool to replay on, and what it rests on.

    Attributes:
        allocator: sizes, groups and rules.
        plan: how the planner came to it; None without a model.
        gpu: the device preset; None without a model.
        weights_dtype: as given, `auto`: what the model's config says.
        facts: what goes into the report's assumptions.
    """

    allocator: AllocatorConfig
    plan: DeploymentPlan | None
    gpu: str | None
    facts: dict[str, Any]
    weights_dtype: str = "auto"


def make_pool(options: PoolOptions) -> Pool:
    """The pool that the options describe.

    Raises:
        InputError: too little is given, or options contradict each other.
        DoesNotFitError: the planner's answer is no.
    """
    if options.model is None:
        return _pool_of_given_size(options)
    plan = plan_deployment(_deployment(options))
    if plan.refusal is not None:
        raise plan.refusal
    allocator = allocator_of_plan(plan, watermark_blocks=options.watermark_blocks, eviction=options.eviction)
    return Pool(
        allocator=allocator,
        plan=plan,
        gpu=options.gpu,
        facts=_facts(options, plan),
        weights_dtype=options.quantization or "auto",
    )


@attrs.frozen(kw_only=True)
class LatencyOptions:
    """What decides how long a step takes, as typed; None where an option was not given."""

    latency: str | None = None
    base_ms: float | None = None
    us_per_prefill_token: float | None = None
    us_per_decoding_sequence: float | None = None
    latency_table: str | None = None
    swap_link_gb_s: float | None = None
    swap_bytes_per_block: int | None = None


def make_latency(options: LatencyOptions, pool: Pool) -> LatencyModel:
    """The latency model: `roofline` for a model on a device, else `linear`; `table` reads measured steps.

    Raises:
        InputError: the model needs something that is not given, or something given has no effect on it.
    """
    name = options.latency or ("table" if options.latency_table else "roofline" if pool.plan else "linear")
    linear = {
        "--base-ms": options.base_ms,
        "--us-per-prefill-token": options.us_per_prefill_token,
        "--us-per-decoding-sequence": options.us_per_decoding_sequence,
    }
    if name != "linear":
        _refuse_given(linear, f"--latency {name}")
    if name != "table":
        _refuse_given({"--latency-table": options.latency_table}, f"--latency {name}")
    if name == "roofline":
        model = _roofline(pool)
    elif name == "linear":
        model = _linear(options)
    elif name == "table" and options.latency_table is not None:
        model = TableLatency.from_csv(Path(options.latency_table))
    elif name == "table":
        raise InputError("--latency table needs --latency-table FILE: a CSV of measured steps")
    else:
        raise InputError(f"--latency {name} is no latency model; there are linear, roofline and table")
    return _with_swapping(model, options, pool)


def _linear(options: LatencyOptions) -> LatencyModel:
    default = LinearLatency()
    return LinearLatency(
        default.base_s if options.base_ms is None else options.base_ms / 1e3,
        default.prefill_token_s if options.us_per_prefill_token is None else options.us_per_prefill_token / 1e6,
        default.decode_seq_s if options.us_per_decoding_sequence is None else options.us_per_decoding_sequence / 1e6,
    )


def _roofline(pool: Pool) -> LatencyModel:
    if pool.plan is None or pool.gpu is None:
        raise InputError("--latency roofline needs --model and --gpu: it is worked out from both")
    return roofline_of_plan(pool.plan, find_device(pool.gpu), pool.weights_dtype)


def _with_swapping(model: LatencyModel, options: LatencyOptions, pool: Pool) -> LatencyModel:
    if options.swap_link_gb_s is None:
        _refuse_given({"--swap-bytes-per-block": options.swap_bytes_per_block}, "a replay without --swap-link-gb-s")
        return model
    bytes_per_block = options.swap_bytes_per_block or (pool.plan.bytes_per_block if pool.plan else None)
    if bytes_per_block is None:
        raise InputError("--swap-link-gb-s needs the bytes of a block: give --model, or --swap-bytes-per-block")
    return SwapLatency(model, bytes_per_block, options.swap_link_gb_s * 1e9)


def _refuse_given(options: Mapping[str, object], where: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} {value} has no effect on {where}; leave it out")


def _pool_of_given_size(options: PoolOptions) -> Pool:
    if options.gpu is not None or options.kv_cache_memory_bytes is not None:
        raise InputError("--gpu and --kv-cache-memory-bytes size a pool for a model; give --model too")
    if options.num_gpu_blocks_override is None:
        raise InputError(
            "how large is the pool? Give --model and --gpu to have it planned, or --num-gpu-blocks-override N (blocks "
            "of --block-size tokens)"
        )
    of_a_model = options.kv_cache_dtype != "auto" or options.quantization is not None
    if of_a_model or options.tensor_parallel_size != 1 or options.pipeline_parallel_size != 1:
        raise InputError(
            "--kv-cache-dtype, --quantization and the parallel sizes have no effect without --model; leave them out"
        )
    block_size = options.block_size or DEFAULT_BLOCK_SIZE
    held_tokens = (options.num_gpu_blocks_override - 1) * block_size
    allocator = AllocatorConfig(
        num_blocks=options.num_gpu_blocks_override,
        groups=[FullAttention(block_size)],
        max_model_len=options.max_model_len or max(1, min(held_tokens, LONGEST_CONTEXT_TOKENS)),
        max_num_reqs=options.max_num_seqs,
        enable_caching=options.enable_prefix_caching,
        watermark_blocks=options.watermark_blocks,
        eviction=options.eviction,
        key_algorithm="trace ids",
    )
    return Pool(
        allocator=allocator, plan=None, gpu=None, facts={"pool": "given in blocks, one full-attention group, no model"}
    )


def _deployment(options: PoolOptions) -> Deployment:
    geometry = load_geometry(str(options.model))
    if options.gpu is None:
        raise InputError(f"--model {options.model} needs --gpu: the pool of a model is planned on a device")
    device = find_device(options.gpu)
    return Deployment(
        geometry=geometry,
        total_bytes=device.total_bytes,
        free_bytes=device.total_bytes,
        utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_concurrent_batches=options.pipeline_parallel_size,
        quantization=None if options.quantization is None else scheme_by_name(options.quantization),
        ignore_config_quantization=options.quantization == "none",
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        state_cache_mode="align" if geometry.has_states and options.enable_prefix_caching else None,
        enable_prefix_caching=options.enable_prefix_caching,
        enforce_eager=options.enforce_eager,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        num_gpu_blocks_override=options.num_gpu_blocks_override,
    )


def _facts(options: PoolOptions, plan: DeploymentPlan) -> dict[str, Any]:
    deployment = plan.deployment
    facts: dict[str, Any] = {
        "pool": "given in blocks (--num-gpu-blocks-override)"
        if options.num_gpu_blocks_override
        else "planned: kvledger plan shows every row",
        "model": deployment.geometry.name,
        "gpu": options.gpu,
        "gpu_total_bytes": deployment.total_bytes,
        "gpu_memory_utilization": deployment.utilization,
        "kv_cache_dtype": deployment.cache_dtype,
        "bytes_per_block_per_gpu": plan.bytes_per_block,
        "num_blocks_if_estimates_are_off": list(plan.blocks_range),
    }
    waste = hybrid_waste(deployment.layer_specs(), plan.pool.max_model_len)
    if waste.floor_bytes < waste.full_bytes:
        facts["saved_by_windows_at_max_model_len"] = {
            "num_tokens": waste.num_tokens,
            "all_full_bytes": waste.full_bytes,
            "window_aware_bytes": waste.floor_bytes,
            "saved_share": waste.wasted_share,
        }
    return facts
