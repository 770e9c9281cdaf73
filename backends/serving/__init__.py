"""Live serving: real models on the allocator's pool. What needs torch is imported when a name is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model_runner import ModelRunner, RequestTokens, StepTokens
    from .registered_attention import register_paged_attention
    from .served_model import kv_cache_config, kv_cache_groups, served_layers, transformers_geometry

_ROOMS = {
    "ModelRunner": "model_runner",
    "RequestTokens": "model_runner",
    "StepTokens": "model_runner",
    "kv_cache_config": "served_model",
    "kv_cache_groups": "served_model",
    "register_paged_attention": "registered_attention",
    "served_layers": "served_model",
    "transformers_geometry": "served_model",
}

__all__ = [
    "ModelRunner",
    "RequestTokens",
    "StepTokens",
    "kv_cache_config",
    "kv_cache_groups",
    "register_paged_attention",
    "served_layers",
    "transformers_geometry",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
