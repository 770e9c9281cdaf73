"""The deciding half of kvledger: allocator, events, ledger state, scheduler, planner. Needs attrs and NumPy only.

Names are imported on first use, so that `import kvledger.core` stays light and a command pays for what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator.allocator import KVCacheAllocator
    from .allocator.config import AllocatorConfig
    from .allocator.prefix_cache import PrefixMatch
    from .cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
    from .deployment.deployment import Deployment
    from .deployment.plan import DeploymentPlan, plan_deployment
    from .errors import CorruptLedgerError, DoesNotFitError, InputError, KVLedgerError, MisuseError
    from .events import Commit, Event, FreeReason
    from .keys.block_hash import block_hasher
    from .keys.extra_keys import ExtraKeys, LoraIdentity, MultimodalItem
    from .keys.token_keys import TokenKeySource
    from .ledger.event_log import EventLog
    from .ledger.state import LedgerState
    from .memory.ledger import MemoryLedger
    from .models.geometry import ModelGeometry, builtin_geometry, geometry_from_config, load_geometry
    from .planner.groups import allocator_groups
    from .planner.inputs import PlanInputs
    from .planner.plan import KVCachePlan, plan_kv_cache
    from .pool.block_pool import NULL_BLOCK, BlockPool
    from .pool.eviction_order import EvictionOrder, make_eviction_order
    from .pool.policies.belady import BeladyOrder, FutureUses
    from .pool.policies.policy import EvictionPolicy, eviction_policies
    from .scheduler.config import SchedulerConfig
    from .scheduler.engine import Wait, engine_loop
    from .scheduler.scheduler import Scheduler, StepOutcome
    from .scheduler.stats import SchedulerStats
    from .types import (
        Backend,
        DraftModel,
        EventSink,
        KeySource,
        LatencyModel,
        Request,
        ScheduledStep,
        StepLoad,
        StepResult,
        TokenBatch,
    )

# Name -> the module that it is imported from when it is first asked for.
_ON_FIRST_USE = {
    "AllocatorConfig": "allocator.config",
    "Backend": "types",
    "BeladyOrder": "pool.policies.belady",
    "BlockPool": "pool.block_pool",
    "CacheKind": "cache_kinds",
    "ChunkedLocal": "cache_kinds",
    "Commit": "events",
    "CompressedState": "cache_kinds",
    "CorruptLedgerError": "errors",
    "Deployment": "deployment.deployment",
    "DeploymentPlan": "deployment.plan",
    "DoesNotFitError": "errors",
    "DraftModel": "types",
    "Event": "events",
    "EventLog": "ledger.event_log",
    "EventSink": "types",
    "EvictionOrder": "pool.eviction_order",
    "EvictionPolicy": "pool.policies.policy",
    "ExtraKeys": "keys.extra_keys",
    "FreeReason": "events",
    "FullAttention": "cache_kinds",
    "FutureUses": "pool.policies.belady",
    "InputError": "errors",
    "KVCacheAllocator": "allocator.allocator",
    "KVCachePlan": "planner.plan",
    "KVLedgerError": "errors",
    "KeySource": "types",
    "LatencyModel": "types",
    "LedgerState": "ledger.state",
    "LoraIdentity": "keys.extra_keys",
    "MemoryLedger": "memory.ledger",
    "MisuseError": "errors",
    "ModelGeometry": "models.geometry",
    "MultimodalItem": "keys.extra_keys",
    "NULL_BLOCK": "pool.block_pool",
    "PlanInputs": "planner.inputs",
    "PrefixMatch": "allocator.prefix_cache",
    "Request": "types",
    "ScheduledStep": "types",
    "Scheduler": "scheduler.scheduler",
    "SchedulerConfig": "scheduler.config",
    "SchedulerStats": "scheduler.stats",
    "SequenceState": "cache_kinds",
    "SlidingWindow": "cache_kinds",
    "StepLoad": "types",
    "StepOutcome": "scheduler.scheduler",
    "StepResult": "types",
    "TokenBatch": "types",
    "TokenKeySource": "keys.token_keys",
    "Wait": "scheduler.engine",
    "allocator_groups": "planner.groups",
    "block_hasher": "keys.block_hash",
    "builtin_geometry": "models.geometry",
    "engine_loop": "scheduler.engine",
    "eviction_policies": "pool.policies.policy",
    "geometry_from_config": "models.geometry",
    "load_geometry": "models.geometry",
    "make_eviction_order": "pool.eviction_order",
    "plan_deployment": "deployment.plan",
    "plan_kv_cache": "planner.plan",
}

__all__ = [
    "NULL_BLOCK",
    "AllocatorConfig",
    "Backend",
    "BeladyOrder",
    "BlockPool",
    "CacheKind",
    "ChunkedLocal",
    "Commit",
    "CompressedState",
    "CorruptLedgerError",
    "Deployment",
    "DeploymentPlan",
    "DoesNotFitError",
    "DraftModel",
    "Event",
    "EventLog",
    "EventSink",
    "EvictionOrder",
    "EvictionPolicy",
    "ExtraKeys",
    "FreeReason",
    "FullAttention",
    "FutureUses",
    "InputError",
    "KVCacheAllocator",
    "KVCachePlan",
    "KVLedgerError",
    "KeySource",
    "LatencyModel",
    "LedgerState",
    "LoraIdentity",
    "MemoryLedger",
    "MisuseError",
    "ModelGeometry",
    "MultimodalItem",
    "PlanInputs",
    "PrefixMatch",
    "Request",
    "ScheduledStep",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SequenceState",
    "SlidingWindow",
    "StepLoad",
    "StepOutcome",
    "StepResult",
    "TokenBatch",
    "TokenKeySource",
    "Wait",
    "allocator_groups",
    "block_hasher",
    "builtin_geometry",
    "engine_loop",
    "eviction_policies",
    "geometry_from_config",
    "load_geometry",
    "make_eviction_order",
    "plan_deployment",
    "plan_kv_cache",
]


def __getattr__(name: str) -> Any:
    module = _ON_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
