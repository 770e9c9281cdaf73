"""Finds a torch device by its name, and the kernels for it."""

import torch

from ...core.errors import InputError
from ...kernels.kernel_set import Kernels
from ...kernels.torch_kernels import TorchKernels
from ..profiling.device import open_cuda_device


def torch_device(device: str | torch.device) -> torch.device:
    """Find a device: `"cpu"`, `"cuda"` (the current one) or `"cuda:1"`.

    Raises:
        InputError: no such kind of device, a GPU that torch does not see (the message says what it sees), or one that
            is not the current device.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"{device!r} is not a device: {error}; use 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise InputError(f"device {device!r}: the cache lives on 'cpu' or 'cuda', not on {found.type!r}")
    open_cuda_device(0 if found.index is None else found.index)
    current = torch.cuda.current_device()
    if found.index not in (None, current):
        raise InputError(
            f"device {device!r} is not the current one (cuda:{current}), where kernels are launched; call "
            f"torch.cuda.set_device({found.index}) first"
        )
    return torch.device("cuda", current)


def default_kernels(device: torch.device) -> Kernels:
    """Make Triton's kernels for a GPU, or their plain-torch twins for a CPU.

    Raises:
        InputError: triton is not installed.
    """
    if device.type == "cpu":
        return TorchKernels()
    try:
        from ...kernels.triton_kernels import TritonKernels
    except ImportError as error:
        raise InputError(
            f"a GPU needs Triton's kernels, and triton cannot be imported ({error}); install kvledger[cuda], or pass "
            "kernels=TorchKernels(), which is slower and waits for the device"
        ) from error
    return TritonKernels()
