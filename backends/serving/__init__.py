"""Live serving: real models on the allocator's pool. What needs torch is imported when a name is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .detokenizer import Tokenizer
    from .engine_options import EngineOptions
    from .errors import EngineFailedError, EngineStoppedError, QueueFullError
    from .live_engine import EngineStats, LiveEngine
    from .live_request import Completion, LiveRequest, RequestStats
    from .model_runner import ModelRunner, RequestTokens, StepTokens
    from .recording import LiveRecording
    from .registered_attention import register_paged_attention
    from .sampling_settings import SamplingSettings
    from .served_model import kv_cache_config, kv_cache_groups, served_layers, transformers_geometry
    from .sizing import SizedEngine, size_engine
    from .token_runner import TokenRunner
    from .token_stream import TokenDelta
    from .transformers_cache import LedgerCache

_ROOMS = {
    "Completion": "live_request",
    "EngineFailedError": "errors",
    "EngineOptions": "engine_options",
    "EngineStats": "live_engine",
    "EngineStoppedError": "errors",
    "LedgerCache": "transformers_cache",
    "LiveEngine": "live_engine",
    "LiveRecording": "recording",
    "LiveRequest": "live_request",
    "ModelRunner": "model_runner",
    "QueueFullError": "errors",
    "RequestStats": "live_request",
    "RequestTokens": "model_runner",
    "SamplingSettings": "sampling_settings",
    "SizedEngine": "sizing",
    "StepTokens": "model_runner",
    "TokenDelta": "token_stream",
    "TokenRunner": "token_runner",
    "Tokenizer": "detokenizer",
    "kv_cache_config": "served_model",
    "kv_cache_groups": "served_model",
    "register_paged_attention": "registered_attention",
    "served_layers": "served_model",
    "size_engine": "sizing",
    "transformers_geometry": "served_model",
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
