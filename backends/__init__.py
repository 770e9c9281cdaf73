"""What does as the events say: the simulated backend, and (with torch) the CUDA backend."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.types import Backend
from .context_rank import ContextRank
from .sim_backend import SimBackend

if TYPE_CHECKING:
    from .cache_arrangement import CacheArrangement
    from .cuda_backend import CudaBackend
    from .layer_access import KVScales

__all__ = ["Backend", "CacheArrangement", "ContextRank", "CudaBackend", "KVScales", "SimBackend"]

# What needs torch, which is imported when one of these is asked for, not before.
_NEEDS_TORCH = {"CacheArrangement": "cache_arrangement", "CudaBackend": "cuda_backend", "KVScales": "layer_access"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEEDS_TORCH[name]}", __name__), name)
