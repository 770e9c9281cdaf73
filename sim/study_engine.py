"""From a plan to the engine that is replayed: pool and groups, a scheduler, and a roofline's step times."""

from typing import Any

import attrs

from ..core.allocator_config import AllocatorConfig
from ..core.allocator_groups import allocator_groups
from ..core.deployment_plan import DeploymentPlan
from ..core.scheduler_config import SchedulerConfig
from .devices import Device
from .replay_setup import ENGINE_RETENTION
from .roofline import RooflineLatency


@attrs.frozen(kw_only=True)
class EngineSetup:
    """The engine that is replayed; `facts` go before the replay's own assumptions."""

    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    latency: RooflineLatency
    facts: dict[str, Any]


def engine_of_plan(plan: DeploymentPlan, device: Device, weights_dtype: str) -> EngineSetup:
    """The engine that serves on a plan's pool.

    Args:
        plan: one that fits.
        device: datasheet figures of each GPU.
        weights_dtype: a quantisation scheme, a dtype, or `auto`: what the model's config says.

    Raises:
        InputError: what the model computes is not known, or a cache of it has no rules for the allocator.
    """
    deployment, pool = plan.deployment, plan.pool
    return EngineSetup(
        allocator=AllocatorConfig(
            num_blocks=plan.num_blocks,
            groups=allocator_groups(pool.configs()[0], deployment.decode_context_parallel_size),
            max_model_len=pool.max_model_len,
            max_num_reqs=deployment.max_num_seqs,
            enable_caching=deployment.enable_prefix_caching,
            retention_interval=ENGINE_RETENTION,
            max_in_flight_tokens=deployment.max_concurrent_batches * deployment.max_num_batched_tokens,
            hash_block_size=pool.hash_block_size,
            scheduler_block_size=pool.scheduler_block_size,
            key_algorithm="trace ids",
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=deployment.max_num_seqs, max_num_batched_tokens=deployment.max_num_batched_tokens
        ),
        latency=RooflineLatency.for_model(
            deployment.geometry,
            device,
            max_num_seqs=deployment.max_num_seqs,
            tensor_parallel_size=deployment.tensor_parallel_size,
            pipeline_parallel_size=deployment.pipeline_parallel_size,
            weights_dtype=weights_dtype,
            kv_cache_dtype=deployment.cache_dtype,
            enforce_eager=deployment.enforce_eager,
        ),
        facts={"pool": "as planned (plan)", "engines": 1},
    )
