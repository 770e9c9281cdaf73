"""Listeners to commits: the durable log, KV events on the wire, and their readers.

Each name is imported when it is first used, since each needs a library of its own (extras `log` and `events`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .durable_log import Clock, DurableLog
    from .errors import LogDamagedError, LogInUseError, LogWriteError
    from .flush_policy import FlushPolicy
    from .kv_event_encoder import KVEventEncoder
    from .kv_event_publisher import KVEventPublisher
    from .kv_event_subscriber import Endpoints, KVEventSubscriber
    from .kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
    from .kv_events_config import KVEventsConfig
    from .log_reader import LogReader
    from .log_rows import LoggedCommit, LoggedNote, RequestArrived, RequestEnded, RunEnded, StepComputed
    from .request_content import ContentRegistry, ListedTokens, RequestContent, SyntheticTokens
    from .shadow_pool import ShadowPool
    from .stream_order import StreamOrder

_MODULES = {
    "AllBlocksCleared": "kv_events",
    "BlockRemoved": "kv_events",
    "BlockStored": "kv_events",
    "Clock": "durable_log",
    "ContentRegistry": "request_content",
    "DurableLog": "durable_log",
    "Endpoints": "kv_event_subscriber",
    "FlushPolicy": "flush_policy",
    "KVEventBatch": "kv_events",
    "KVEventEncoder": "kv_event_encoder",
    "KVEventPublisher": "kv_event_publisher",
    "KVEventSubscriber": "kv_event_subscriber",
    "KVEventsConfig": "kv_events_config",
    "ListedTokens": "request_content",
    "LogDamagedError": "errors",
    "LogInUseError": "errors",
    "LogReader": "log_reader",
    "LogWriteError": "errors",
    "LoggedCommit": "log_rows",
    "LoggedNote": "log_rows",
    "RequestArrived": "log_rows",
    "RequestContent": "request_content",
    "RequestEnded": "log_rows",
    "RunEnded": "log_rows",
    "ShadowPool": "shadow_pool",
    "StepComputed": "log_rows",
    "StreamOrder": "stream_order",
    "SyntheticTokens": "request_content",
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
