"""From a plan to the engine that is replayed: pool and groups, a scheduler, and a roofline's step times."""

from typing import Any

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.deployment.plan import DeploymentPlan
from ...core.scheduler.config import SchedulerConfig
from ..latency.devices import Device
from ..latency.roofline import RooflineLatency
from ..scenario.replay_setup import allocator_of_plan, roofline_of_plan


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
    deployment = plan.deployment
    return EngineSetup(
        allocator=allocator_of_plan(plan),
        scheduler=SchedulerConfig(
            max_num_seqs=deployment.max_num_seqs, max_num_batched_tokens=deployment.max_num_batched_tokens
        ),
        latency=roofline_of_plan(plan, device, weights_dtype),
        facts={"pool": "as planned (plan)", "engines": 1},
    )
