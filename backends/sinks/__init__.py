"""Listeners to commits: the durable log, KV events on the wire, and their readers.

Each name is imported when it is first used, since each needs a library of its own (extras `log` and `events`).
"""

import importlib
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

_MODULES = {
    "AllBlocksCleared": "kv_events.schema",
    "BlockRemoved": "kv_events.schema",
    "BlockStored": "kv_events.schema",
    "Clock": "log.durable_log",
    "ContentRegistry": "kv_events.content",
    "DurableLog": "log.durable_log",
    "Endpoints": "kv_events.subscriber",
    "FlushPolicy": "log.flush_policy",
    "KVEventBatch": "kv_events.schema",
    "KVEventEncoder": "kv_events.encoder",
    "KVEventPublisher": "kv_events.publisher",
    "KVEventSubscriber": "kv_events.subscriber",
    "KVEventsConfig": "kv_events.schema",
    "ListedTokens": "kv_events.content",
    "LogDamagedError": "errors",
    "LogInUseError": "errors",
    "LogReader": "log.reader",
    "LogWriteError": "errors",
    "LoggedCommit": "log.rows",
    "LoggedNote": "log.rows",
    "RequestArrived": "log.rows",
    "RequestContent": "kv_events.content",
    "RequestEnded": "log.rows",
    "RunEnded": "log.rows",
    "ShadowPool": "kv_events.shadow_pool",
    "StepComputed": "log.rows",
    "StreamOrder": "kv_events.stream_order",
    "SyntheticTokens": "kv_events.content",
}

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


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
