"""vLLM's schedulers with our manager: `--scheduler-cls kvledger.vllm.Scheduler`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.errors import InputError
from .config import EVICTION, MANAGER, refuse, refused_options
from .manager import LedgerManager
from .names import VllmAsyncScheduler, VllmScheduler, scheduling
from .shadow import ShadowManager

# Sessions that wait for their next input hold blocks and do not count as running.
_MAX_WAITING_SESSIONS = 1024


def options_of(vllm_config: Any) -> dict[str, Any]:
    """Return our options out of vLLM's `--additional-config`, as arguments of the manager.

    Raises:
        InputError: an option of ours is unknown, or the engine needs something that we do not do.
    """
    refuse(MANAGER, refused_options(vllm_config))
    given = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    unknown = [name for name in given if name.startswith("kvledger_") and name != EVICTION]
    if unknown:
        raise InputError(f"--additional-config names {', '.join(unknown)}; kvledger reads {EVICTION}")
    return {"eviction": given.get(EVICTION, "lru"), "max_num_reqs": max_num_reqs_of(vllm_config)}


def max_num_reqs_of(vllm_config: Any) -> int:
    """Return how many requests can hold blocks at the same time."""
    return vllm_config.scheduler_config.max_num_seqs + _MAX_WAITING_SESSIONS


@contextmanager
def manager_class(make: Any) -> Iterator[None]:
    """Let vLLM's scheduler make its manager with `make` while the context lasts."""
    theirs, scheduling.KVCacheManager = scheduling.KVCacheManager, make
    try:
        yield
    finally:
        scheduling.KVCacheManager = theirs


def check_synchronous(vllm_config: Any, instead: str) -> None:
    """Raise `InputError` if asynchronous scheduling is on, which a synchronous scheduler would get wrong."""
    if vllm_config.scheduler_config.async_scheduling:
        raise InputError(
            f"asynchronous scheduling is on: give --scheduler-cls kvledger.vllm.{instead}, or --no-async-scheduling"
        )


class Scheduler(VllmScheduler):
    """vLLM's scheduler for `--no-async-scheduling`, with our manager."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_synchronous(vllm_config, "AsyncScheduler")
        with manager_class(partial(LedgerManager, **options_of(vllm_config))):
            super().__init__(vllm_config, *args, **kwargs)


class AsyncScheduler(VllmAsyncScheduler):
    """vLLM's asynchronous scheduler, with our manager."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with manager_class(partial(LedgerManager, **options_of(vllm_config))):
            super().__init__(vllm_config, *args, **kwargs)


class ShadowScheduler(VllmScheduler):
    """vLLM's scheduler for `--no-async-scheduling`, with vLLM's manager and ours beside it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_synchronous(vllm_config, "ShadowAsyncScheduler")
        with manager_class(partial(ShadowManager, **options_of(vllm_config))):
            super().__init__(vllm_config, *args, **kwargs)


class ShadowAsyncScheduler(VllmAsyncScheduler):
    """vLLM's asynchronous scheduler, with vLLM's manager and ours beside it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with manager_class(partial(ShadowManager, **options_of(vllm_config))):
            super().__init__(vllm_config, *args, **kwargs)
