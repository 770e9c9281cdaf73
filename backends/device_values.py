"""Values of the host on a device, without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray


def on_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """An array on a device, in its dtype.

    On a GPU it travels from pinned memory behind what is queued there, and nobody waits for it; on a CPU it may share
    the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
