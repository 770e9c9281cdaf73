"""Live serving: real models on the allocator's pool. What needs torch is imported when a name is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.live_engine import EngineStats, LiveEngine
    from .engine.options import EngineOptions
    from .engine.recording import LiveRecording
    from .engine.request import Completion, LiveRequest, RequestStats
    from .engine.token_stream import TokenDelta
    from .errors import EngineFailedError, EngineStoppedError, QueueFullError
    from .model.attention import register_paged_attention
    from .model.runner import ModelRunner, RequestTokens, StepTokens, TokenRunner
    from .model.served_model import kv_cache_config, kv_cache_groups, served_layers, transformers_geometry
    from .model.sizing import SizedEngine, size_engine
    from .model.transformers_cache import LedgerCache
    from .sampling.detokenizer import Tokenizer
    from .sampling.settings import SamplingSettings

_ROOMS = {
    "Completion": "engine.request",
    "EngineFailedError": "errors",
    "EngineOptions": "engine.options",
    "EngineStats": "engine.live_engine",
    "EngineStoppedError": "errors",
    "LedgerCache": "model.transformers_cache",
    "LiveEngine": "engine.live_engine",
    "LiveRecording": "engine.recording",
    "LiveRequest": "engine.request",
    "ModelRunner": "model.runner",
    "QueueFullError": "errors",
    "RequestStats": "engine.request",
    "RequestTokens": "model.runner",
    "SamplingSettings": "sampling.settings",
    "SizedEngine": "model.sizing",
    "StepTokens": "model.runner",
    "TokenDelta": "engine.token_stream",
    "TokenRunner": "model.runner",
    "Tokenizer": "sampling.detokenizer",
    "kv_cache_config": "model.served_model",
    "kv_cache_groups": "model.served_model",
    "register_paged_attention": "model.attention",
    "served_layers": "model.served_model",
    "size_engine": "model.sizing",
    "transformers_geometry": "model.served_model",
}

__all__ = [
    "Completion",
    "EngineFailedError",
    "EngineOptions",
    "EngineStats",
    "EngineStoppedError",
    "LedgerCache",
    "LiveEngine",
    "LiveRecording",
    "LiveRequest",
    "ModelRunner",
    "QueueFullError",
    "RequestStats",
    "RequestTokens",
    "SamplingSettings",
    "SizedEngine",
    "StepTokens",
    "TokenDelta",
    "TokenRunner",
    "Tokenizer",
    "kv_cache_config",
    "kv_cache_groups",
    "register_paged_attention",
    "served_layers",
    "size_engine",
    "transformers_geometry",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {package}, which is not installed: pip install 'kvledger[serve]'", name=package
        ) from error
