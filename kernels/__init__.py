"""Triton kernels that write, copy and read a paged KV cache, each with a plain-torch twin.

`TorchKernels` needs torch; `TritonKernels` needs triton too. Both are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .copy_blocks import BlockRegions
    from .errors import KernelInputError
    from .kernel_set import Kernels
    from .scales import MissingScaleWarning, kv_scale
    from .slot_mapping import SlotTables
    from .torch_kernels import TorchKernels
    from .triton_kernels import TritonKernels

__all__ = [
    "BlockRegions",
    "KernelInputError",
    "Kernels",
    "MissingScaleWarning",
    "SlotTables",
    "TorchKernels",
    "TritonKernels",
    "kv_scale",
]

_MODULES = {
    "BlockRegions": "copy_blocks",
    "KernelInputError": "errors",
    "Kernels": "kernel_set",
    "MissingScaleWarning": "scales",
    "SlotTables": "slot_mapping",
    "TorchKernels": "torch_kernels",
    "TritonKernels": "triton_kernels",
    "kv_scale": "scales",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "triton"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {package}, which is not installed: pip install 'kvledger[cuda]'", name=package
        ) from error
