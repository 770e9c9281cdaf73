"""The deciding half of kvledger: allocator, events, ledger state, scheduler, planner. Needs attrs and NumPy only."""

from .allocator import KVCacheAllocator
from .allocator_config import AllocatorConfig
from .block_pool import NULL_BLOCK, BlockPool
from .cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from .errors import CorruptLedgerError, DoesNotFitError, InputError, KVLedgerError, MisuseError
from .event_log import EventLog
from .events import Commit, Event, FreeReason
from .ledger_state import LedgerState
from .prefix_match import PrefixMatch
from .types import Backend, EventSink, KeySource, LatencyModel, Request, ScheduledStep, StepResult, TokenBatch

__all__ = [
    "NULL_BLOCK",
    "AllocatorConfig",
    "Backend",
    "BlockPool",
    "CacheKind",
    "ChunkedLocal",
    "Commit",
    "CompressedState",
    "CorruptLedgerError",
    "DoesNotFitError",
    "Event",
    "EventLog",
    "EventSink",
    "FreeReason",
    "FullAttention",
    "InputError",
    "KVCacheAllocator",
    "KVLedgerError",
    "KeySource",
    "LatencyModel",
    "LedgerState",
    "MisuseError",
    "PrefixMatch",
    "Request",
    "ScheduledStep",
    "SequenceState",
    "SlidingWindow",
    "StepResult",
    "TokenBatch",
]
