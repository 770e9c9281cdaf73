"""The deciding half of kvledger: allocator, events, ledger state, scheduler, planner. Needs attrs and NumPy only.

Names are imported on first use, so that `import kvledger.core` stays light and a command pays for what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator import KVCacheAllocator
    from .allocator_config import AllocatorConfig
    from .allocator_groups import allocator_groups
    from .belady import BeladyOrder, FutureUses
    from .block_hash import block_hasher
    from .block_pool import NULL_BLOCK, BlockPool
    from .cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
    from .deployment import Deployment
    from .deployment_plan import DeploymentPlan, plan_deployment
    from .engine import Wait, engine_loop
    from .errors import CorruptLedgerError, DoesNotFitError, InputError, KVLedgerError, MisuseError
    from .event_log import EventLog
    from .events import Commit, Event, FreeReason
    from .eviction import EvictionOrder, make_eviction_order
    from .extra_keys import ExtraKeys, LoraIdentity, MultimodalItem
    from .ledger_state import LedgerState
    from .memory_ledger import MemoryLedger
    from .model_geometry import ModelGeometry, builtin_geometry, geometry_from_config, load_geometry
    from .plan_inputs import PlanInputs
    from .planning import KVCachePlan, plan_kv_cache
    from .prefix_match import PrefixMatch
    from .scheduler import Scheduler, StepOutcome
    from .scheduler_config import SchedulerConfig
    from .scheduler_stats import SchedulerStats
    from .token_key_source import TokenKeySource
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
    "AllocatorConfig": "allocator_config",
    "Backend": "types",
    "BeladyOrder": "belady",
    "BlockPool": "block_pool",
    "CacheKind": "cache_kinds",
    "ChunkedLocal": "cache_kinds",
    "Commit": "events",
    "CompressedState": "cache_kinds",
    "CorruptLedgerError": "errors",
    "Deployment": "deployment",
    "DeploymentPlan": "deployment_plan",
    "DoesNotFitError": "errors",
    "DraftModel": "types",
    "Event": "events",
    "EventLog": "event_log",
    "EventSink": "types",
    "EvictionOrder": "eviction",
    "ExtraKeys": "extra_keys",
    "FreeReason": "events",
    "FullAttention": "cache_kinds",
    "FutureUses": "belady",
    "InputError": "errors",
    "KVCacheAllocator": "allocator",
    "KVCachePlan": "planning",
    "KVLedgerError": "errors",
    "KeySource": "types",
    "LatencyModel": "types",
    "LedgerState": "ledger_state",
    "LoraIdentity": "extra_keys",
    "MemoryLedger": "memory_ledger",
    "MisuseError": "errors",
    "ModelGeometry": "model_geometry",
    "MultimodalItem": "extra_keys",
    "NULL_BLOCK": "block_pool",
    "PlanInputs": "plan_inputs",
    "PrefixMatch": "prefix_match",
    "Request": "types",
    "ScheduledStep": "types",
    "Scheduler": "scheduler",
    "SchedulerConfig": "scheduler_config",
    "SchedulerStats": "scheduler_stats",
    "SequenceState": "cache_kinds",
    "SlidingWindow": "cache_kinds",
    "StepLoad": "types",
    "StepOutcome": "scheduler",
    "StepResult": "types",
    "TokenBatch": "types",
    "TokenKeySource": "token_key_source",
    "Wait": "engine",
    "allocator_groups": "allocator_groups",
    "block_hasher": "block_hash",
    "builtin_geometry": "model_geometry",
    "engine_loop": "engine",
    "geometry_from_config": "model_geometry",
    "load_geometry": "model_geometry",
    "make_eviction_order": "eviction",
    "plan_deployment": "deployment_plan",
    "plan_kv_cache": "planning",
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
