"""Live serving of real models on the allocator's pool. Names that need torch are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.live_engine import EngineStats, LiveEngine
    from .engine.options import EngineOptions
    from .engine.recording import LiveRecording
    from .engine.request import Completion, LiveRequest, RequestStats, TokenDelta
    from .engine.sizing import SizedEngine, size_engine
    from .errors import EngineFailedError, EngineStoppedError, QueueFullError
    from .model.attention import register_paged_attention
    from .model.runner import ModelRunner, RequestTokens, StepTokens
    from .model.served_model import kv_cache_config, served_layers, transformers_geometry
    from .model.transformers_cache import LedgerCache
    from .sampling.detokenizer import Tokenizer
    from .sampling.settings import SamplingSettings

_NAMES_IN = {
    "engine.live_engine": ("EngineStats", "LiveEngine"),
    "engine.options": ("EngineOptions",),
    "engine.recording": ("LiveRecording",),
    "engine.request": ("Completion", "LiveRequest", "RequestStats", "TokenDelta"),
    "engine.sizing": ("SizedEngine", "size_engine"),
    "errors": ("EngineFailedError", "EngineStoppedError", "QueueFullError"),
    "model.attention": ("register_paged_attention",),
    "model.runner": ("ModelRunner", "RequestTokens", "StepTokens"),
    "model.served_model": ("kv_cache_config", "served_layers", "transformers_geometry"),
    "model.transformers_cache": ("LedgerCache",),
    "sampling.detokenizer": ("Tokenizer",),
    "sampling.settings": ("SamplingSettings",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

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
    "Tokenizer",
    "kv_cache_config",
    "register_paged_attention",
    "served_layers",
    "size_engine",
    "transformers_geometry",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {package}, which is not installed: pip install 'kvledger[serve]'", name=package
        ) from error
