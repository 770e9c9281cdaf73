"""The kernel sets that a test runs on: one file of tests serves twins, interpreter and GPU.

With a GPU, tensors are on it and Triton compiles for it; without, tensors are in host memory and Triton interprets.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

KERNEL_SETS = ("torch", "triton")


@cache
def device() -> Any:
    """Where the tensors are."""
    import torch

    # With more threads, single operations stall for milliseconds while another process has the other core.
    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel_set(name: str) -> Any:
    """`torch`: the twins; `triton`: the kernels. Skips where the package is missing."""
    for package in ("torch", name):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    device()
    return _kernel_set(name)


@cache
def _kernel_set(name: str) -> Any:
    from kvledger import kernels

    if name == "torch":
        return kernels.TorchKernels()
    from tests.kernels.interpreter_repairs import use_interpreter_without_gpu

    use_interpreter_without_gpu()
    return kernels.TritonKernels()
