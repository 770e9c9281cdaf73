"""The KV-cache memory of LLM serving as an event-sourced ledger: allocate, simulate, prove, serve.

`kvledger.core` decides where every token's keys and values live, `kvledger.backends` does it in simulated or GPU
memory, `kvledger.sim` answers questions about hardware from request traces, and `kvledger.testing` property-tests
allocators. Each of the four lists its public names: `dir(kvledger.core)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backends, core, kernels, sim

__version__ = "0.2.0"

__all__ = ["__version__", "backends", "core", "kernels", "sim", "testing"]


def __getattr__(name: str) -> Any:
    if name in ("backends", "core", "kernels", "sim", "testing"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
