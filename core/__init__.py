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
    from .scheduler.config import SchedulerConfig, SchedulerStats
    from .scheduler.engine import Wait, engine_loop
    from .scheduler.scheduler import Scheduler, StepOutcome
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

# Module -> the names that are imported from it when they are first asked for.
_NAMES_IN = {
    "allocator.allocator": ("KVCacheAllocator",),
    "allocator.config": ("AllocatorConfig",),
    "allocator.prefix_cache": ("PrefixMatch",),
    "cache_kinds": ("CacheKind", "ChunkedLocal", "CompressedState", "FullAttention", "SequenceState", "SlidingWindow"),
    "deployment.deployment": ("Deployment",),
    "deployment.plan": ("DeploymentPlan", "plan_deployment"),
    "errors": ("CorruptLedgerError", "DoesNotFitError", "InputError", "KVLedgerError", "MisuseError"),
    "events": ("Commit", "Event", "FreeReason"),
    "keys.block_hash": ("block_hasher",),
    "keys.extra_keys": ("ExtraKeys", "LoraIdentity", "MultimodalItem"),
    "keys.token_keys": ("TokenKeySource",),
    "ledger.event_log": ("EventLog",),
    "ledger.state": ("LedgerState",),
    "memory.ledger": ("MemoryLedger",),
    "models.geometry": ("ModelGeometry", "builtin_geometry", "geometry_from_config", "load_geometry"),
    "planner.groups": ("allocator_groups",),
    "planner.inputs": ("PlanInputs",),
    "planner.plan": ("KVCachePlan", "plan_kv_cache"),
    "pool.block_pool": ("BlockPool", "NULL_BLOCK"),
    "pool.eviction_order": ("EvictionOrder", "make_eviction_order"),
    "pool.policies.belady": ("BeladyOrder", "FutureUses"),
    "pool.policies.policy": ("EvictionPolicy", "eviction_policies"),
    "scheduler.config": ("SchedulerConfig", "SchedulerStats"),
    "scheduler.engine": ("Wait", "engine_loop"),
    "scheduler.scheduler": ("Scheduler", "StepOutcome"),
    "types": (
        "Backend",
        "DraftModel",
        "EventSink",
        "KeySource",
        "LatencyModel",
        "Request",
        "ScheduledStep",
        "StepLoad",
        "StepResult",
        "TokenBatch",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

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
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
