"""The engine of a scenario: its pool and groups, its scheduler and its latency model. Nothing is filled in silently."""

import math
from typing import Any

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.deployment.deployment import DEFAULT_BLOCK_SIZE
from ...core.deployment.estimates import version_of
from ...core.deployment.plan import DeploymentPlan, plan_deployment
from ...core.errors import InputError
from ...core.models.drafts import METHODS
from ...core.planner.groups import allocator_groups
from ...core.planner.verdict import hybrid_waste
from ...core.scheduler.config import SchedulerConfig
from ...core.types import LatencyModel
from ..engine.sampling import DraftAcceptance
from ..fleet.fleet import EngineParts
from ..latency.devices import Device, find_device
from ..latency.linear import SwapLatency
from ..latency.models import LatencyInputs, make_latency
from .defaults import described, engine_defaults, served, with_engine_defaults
from .deployment import DRAFT_OPTIONS, read_question
from .options import spelled
from .scenario import Scenario

# No published model has a longer context; a pool without a model serves requests up to this length.
LONGEST_CONTEXT_TOKENS = 1 << 20
# The vLLM whose rules the allocator and the scheduler follow, unless another is given.
RULES_OF = "0.32"
LOOK_AHEAD_SINCE = (0, 33)
# vLLM's own engine keeps no boundary states beyond those that its rules ask for.
ENGINE_RETENTION = 0


@attrs.frozen(kw_only=True)
class Pool:
    """A pool to replay on: how the planner came to it (None without a model), its device, and facts for the report."""

    allocator: AllocatorConfig
    plan: DeploymentPlan | None = None
    device: Device | None = None
    facts: dict[str, Any]


@attrs.frozen(kw_only=True)
class Engine:
    """One engine: the parts that a replay runs, and the pool that they were made from."""

    pool: Pool
    parts: EngineParts


def engine_of(scenario: Scenario, pool: Pool | None = None) -> Engine:
    """The engine that a scenario describes, on its own pool unless another is given.

    Raises:
        InputError: something is missing, unknown or contradictory.
        DoesNotFitError: the planner's answer is no.
    """
    pool = pool or pool_of(scenario)
    latency = latency_of(scenario, pool)
    if (scenario.preemption_mode == "swap") != (scenario.swap_link_gb_s is not None):
        raise InputError("--preemption-mode swap and --swap-link-gb-s go together: copies take time")
    if not scenario.http_ms < math.inf:
        raise InputError(f"--http-ms is {scenario.http_ms}; it must be a number of milliseconds, 0 or more")
    rate, seed = scenario.draft_acceptance_rate, scenario.seed or 0
    if (scenario.num_speculative_tokens > 0) != (rate is not None):
        raise InputError("--num-speculative-tokens and --draft-acceptance-rate go together; neither has a default")
    parts = EngineParts(
        allocator=pool.allocator,
        scheduler=scheduler_of(scenario),
        latency=latency,
        # Each engine draws from a generator of its own.
        drafts_of=lambda index: None if rate is None else DraftAcceptance(rate, seed + index),
        async_scheduling=bool(with_engine_defaults(scenario).async_scheduling),
        http_s=scenario.http_ms / 1e3,
    )
    return Engine(pool=pool, parts=parts)


def scheduler_of(scenario: Scenario) -> SchedulerConfig:
    """The scheduler's limits and policies."""
    same = ("enable_chunked_prefill", "long_prefill_token_threshold", "preemption_victim", "preemption_mode")
    same += ("swap_space_blocks", "num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens")
    scenario = with_engine_defaults(scenario)
    return SchedulerConfig(
        policy=scenario.scheduling_policy,
        protect_preempted=scenario.protect_preempted,
        reserve_full_sequence=scenario.scheduler_reserve_full_isl,
        num_lookahead_tokens=0 if scenario.speculative_method == "ngram" else -1,
        **{name: getattr(scenario, name) for name in same},
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def pool_of(scenario: Scenario) -> Pool:
    """The pool: of a given number of blocks in one full-attention group, or planned for a model.

    Raises:
        InputError: too little is given, or options contradict each other.
        DoesNotFitError: the planner's answer is no.
    """
    if scenario.model is None:
        return _pool_of_given_size(scenario)
    if scenario.gpu is None and scenario.total_memory is None:
        raise InputError(f"--model {scenario.model} needs --gpu: the pool of a model is planned on a device")
    plan = plan_deployment(read_question(served(scenario)).deployment)
    if plan.refusal is not None:
        raise plan.refusal
    return Pool(
        allocator=allocator_of_plan(plan, scenario),
        plan=plan,
        device=None if scenario.gpu is None else find_device(scenario.gpu),
        facts=_facts(scenario, plan),
    )


def allocator_of_plan(plan: DeploymentPlan, scenario: Scenario) -> AllocatorConfig:
    """The pool of a plan that fits, with the planner's groups.

    Raises InputError: a cache of the model has no rules for the allocator.
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
        watermark_blocks=scenario.watermark_blocks,
        **_keys_for_drafts(scenario, deployment.drafts is not None and deployment.drafts.uses_hidden_states),
        hash_block_size=pool.hash_block_size,
        scheduler_block_size=pool.scheduler_block_size,
        eviction=scenario.eviction,
        key_algorithm="trace ids",
    )


def latency_of(scenario: Scenario, pool: Pool) -> LatencyModel:
    """The latency model, as `make_latency` chooses it.

    Raises InputError: the model needs something that is not given, or something given has no effect on it.
    """
    inputs = LatencyInputs(
        base_ms=scenario.base_ms,
        us_per_prefill_token=scenario.us_per_prefill_token,
        us_per_decoding_sequence=scenario.us_per_decoding_sequence,
        latency_table=scenario.latency_table,
        kernel_profile=scenario.kernel_profile,
        calibration=scenario.calibration,
        enable_expert_parallel=scenario.enable_expert_parallel,
        deployment=None if pool.plan is None else pool.plan.deployment,
        device=pool.device,
        weights_dtype=scenario.quantization or "auto",
    )
    return _with_swapping(make_latency(scenario.latency, inputs), scenario, pool)


def _with_swapping(model: LatencyModel, scenario: Scenario, pool: Pool) -> LatencyModel:
    if scenario.swap_link_gb_s is None:
        if scenario.swap_bytes_per_block is not None:
            raise InputError(
                f"--swap-bytes-per-block {scenario.swap_bytes_per_block} has no effect on a replay without "
                "--swap-link-gb-s; leave it out"
            )
        return model
    bytes_per_block = scenario.swap_bytes_per_block or (pool.plan.bytes_per_block if pool.plan else None)
    if bytes_per_block is None:
        raise InputError("--swap-link-gb-s needs the bytes of a block: give --model, or --swap-bytes-per-block")
    return SwapLatency(model, bytes_per_block, scenario.swap_link_gb_s * 1e9)


def _pool_of_given_size(scenario: Scenario) -> Pool:
    if scenario.gpu is not None or scenario.kv_cache_memory_bytes is not None:
        raise InputError("--gpu and --kv-cache-memory-bytes size a pool for a model; give --model too")
    if scenario.num_gpu_blocks_override is None:
        raise InputError(
            "how large is the pool? Give --model and --gpu to have it planned, or --num-gpu-blocks-override N (blocks "
            "of --block-size tokens)"
        )
    of_a_model = scenario.kv_cache_dtype != "auto" or scenario.quantization is not None
    ranks = scenario.tensor_parallel_size, scenario.pipeline_parallel_size, scenario.decode_context_parallel_size
    if of_a_model or ranks != (1, 1, 1):
        raise InputError(
            "--kv-cache-dtype, --quantization and the parallel sizes have no effect without --model; leave them out"
        )
    method = _method_without_a_model(scenario)
    defaults = engine_defaults(scenario)
    block_size = _given(scenario.block_size, DEFAULT_BLOCK_SIZE)
    limit = None if scenario.max_model_len == -1 else scenario.max_model_len  # -1: the longest that fits
    held_tokens = (scenario.num_gpu_blocks_override - 1) * block_size
    allocator = AllocatorConfig(
        num_blocks=scenario.num_gpu_blocks_override,
        groups=[FullAttention(block_size)],
        max_model_len=_given(limit, max(1, min(held_tokens, LONGEST_CONTEXT_TOKENS))),
        max_num_reqs=_given(scenario.max_num_seqs, defaults.get("max_num_seqs", 0)),
        enable_caching=scenario.enable_prefix_caching,
        watermark_blocks=scenario.watermark_blocks,
        **_keys_for_drafts(scenario, method in ("mtp", "eagle")),
        eviction=scenario.eviction,
        key_algorithm="trace ids",
    )
    facts = {
        "pool": "given in blocks, one full-attention group, no model",
        "rules_of": f"vLLM {_rules_of(scenario)}",
        **_stated(defaults),
    }
    if method is not None:
        facts["drafts"] = f"by {method} (--speculative-method); the drafter's own layers are not in the pool"
    return Pool(allocator=allocator, facts=facts)


def _rules_of(scenario: Scenario) -> str:
    return scenario.engine_version or RULES_OF


def _keys_for_drafts(scenario: Scenario, uses_hidden_states: bool) -> dict[str, Any]:
    """What the allocator does where a drafter needs hidden states: keys look ahead from 0.33 on, else hits are cut."""
    version = version_of(_rules_of(scenario))
    if not uses_hidden_states:
        return {}
    return {"num_lookahead_tokens": 1} if version >= LOOK_AHEAD_SINCE else {"use_eagle": True}


def _method_without_a_model(scenario: Scenario) -> str | None:
    """How drafts are made where no model is given: eagle unless something else is; None without drafts."""
    if scenario.draft_model is not None or scenario.num_draft_layers is not None:
        raise InputError("--draft-model and --num-draft-layers say what a drafter stores beside a model; give --model")
    if scenario.num_speculative_tokens == 0:
        if scenario.speculative_method is not None:
            raise InputError("--speculative-method says how drafts are made; give --num-speculative-tokens too")
        return None
    method = scenario.speculative_method or "eagle"
    if method not in METHODS:
        raise InputError(f"--speculative-method is {method!r}; it must be one of {', '.join(METHODS)}")
    return method


def _stated(defaults: dict[str, Any]) -> dict[str, str]:
    return {"engine_defaults": ", ".join(described(defaults))} if defaults else {}


def _facts(scenario: Scenario, plan: DeploymentPlan) -> dict[str, Any]:
    deployment = plan.deployment
    facts: dict[str, Any] = {
        "pool": "given in blocks (--num-gpu-blocks-override)"
        if scenario.num_gpu_blocks_override
        else "planned: kvledger plan shows every row",
        "model": deployment.geometry.name,
        "gpu": scenario.gpu,
        "gpu_total_bytes": deployment.total_bytes,
        "gpu_memory_utilization": deployment.utilization,
        "kv_cache_dtype": deployment.cache_dtype,
        "bytes_per_block_per_gpu": plan.bytes_per_block,
        "num_blocks_if_estimates_are_off": list(plan.blocks_range),
    }
    facts |= {"rules_of": f"vLLM {_rules_of(scenario)}", **_stated(engine_defaults(scenario))}
    own = deployment.geometry.default_max_model_len
    if scenario.max_model_len is None and own is not None and plan.pool.max_model_len < own:
        facts["longest_request"] = f"{plan.pool.max_model_len:,} tokens, as the pool holds; the model's own is {own:,}"
    if deployment.geometry.warnings:
        facts["model_warnings"] = list(deployment.geometry.warnings)
    if deployment.cache_notes:
        facts["kv_cache_notes"] = spelled("; ".join(deployment.cache_notes), ("kv_cache_dtype",))
    if deployment.drafts is not None:
        facts["drafts"] = spelled(deployment.drafts.assumption(), DRAFT_OPTIONS)
    waste = hybrid_waste(deployment.layer_specs(), plan.pool.max_model_len)
    if waste.floor_bytes < waste.full_bytes:
        facts["saved_by_windows_at_max_model_len"] = {
            "num_tokens": waste.num_tokens,
            "all_full_bytes": waste.full_bytes,
            "window_aware_bytes": waste.floor_bytes,
            "saved_share": waste.wasted_share,
        }
    return facts
