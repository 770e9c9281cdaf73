"""Sinks for commits (the durable log, KV events, metrics), and the readers of what they write.

Each name is imported on first use, since each needs its own libraries (extras `log` and `events`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import LogDamagedError, LogInUseError, LogWriteError
    from .kv_events.content import ContentRegistry, ListedTokens, RequestContent, SyntheticTokens
    from .kv_events.encoder import KVEventEncoder
    from .kv_events.publisher import KVEventPublisher
    from .kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventsConfig
    from .kv_events.shadow_pool import ShadowPool
    from .kv_events.stream_order import StreamOrder
    from .kv_events.subscriber import Endpoints, KVEventSubscriber
    from .log.durable_log import Clock, DurableLog
    from .log.flush_policy import FlushPolicy
    from .log.reader import LogReader
    from .log.rows import LoggedCommit, LoggedNote, RequestArrived, RequestEnded, RunEnded, StepComputed

_NAMES_IN = {
    "errors": ("LogDamagedError", "LogInUseError", "LogWriteError"),
    "kv_events.content": ("ContentRegistry", "ListedTokens", "RequestContent", "SyntheticTokens"),
    "kv_events.encoder": ("KVEventEncoder",),
    "kv_events.publisher": ("KVEventPublisher",),
    "kv_events.schema": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEventBatch", "KVEventsConfig"),
    "kv_events.shadow_pool": ("ShadowPool",),
    "kv_events.stream_order": ("StreamOrder",),
    "kv_events.subscriber": ("Endpoints", "KVEventSubscriber"),
    "log.durable_log": ("Clock", "DurableLog"),
    "log.flush_policy": ("FlushPolicy",),
    "log.reader": ("LogReader",),
    "log.rows": ("LoggedCommit", "LoggedNote", "RequestArrived", "RequestEnded", "RunEnded", "StepComputed"),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Clock",
    "ContentRegistry",
    "DurableLog",
    "Endpoints",
    "FlushPolicy",
    "KVEventBatch",
    "KVEventEncoder",
    "KVEventPublisher",
    "KVEventSubscriber",
    "KVEventsConfig",
    "ListedTokens",
    "LogDamagedError",
    "LogInUseError",
    "LogReader",
    "LogWriteError",
    "LoggedCommit",
    "LoggedNote",
    "RequestArrived",
    "RequestContent",
    "RequestEnded",
    "RunEnded",
    "ShadowPool",
    "StepComputed",
    "StreamOrder",
    "SyntheticTokens",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
