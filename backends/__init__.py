"""Backends follow the allocator's events: one in simulated memory, one (with torch) in the memory of a device.

Each name is imported when it is first used, because some need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.types import Backend
    from .context_rank import ContextRank
    from .cuda.backend import CudaBackend
    from .cuda.layer_access import KVScales
    from .cuda.layout import CacheArrangement
    from .sim_backend import SimBackend

_MODULES = {
    "Backend": "..core.types",
    "CacheArrangement": ".cuda.layout",
    "ContextRank": ".context_rank",
    "CudaBackend": ".cuda.backend",
    "KVScales": ".cuda.layer_access",
    "SimBackend": ".sim_backend",
}

__all__ = ["Backend", "CacheArrangement", "ContextRank", "CudaBackend", "KVScales", "SimBackend"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return __all__
