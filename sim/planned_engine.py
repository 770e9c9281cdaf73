"""From a plan to an engine: the pool with its groups, and the step times of the model on its device."""

from ..core.allocator_config import AllocatorConfig
from ..core.allocator_groups import allocator_groups
from ..core.deployment_plan import DeploymentPlan
from .devices import Device
from .roofline import RooflineLatency

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
