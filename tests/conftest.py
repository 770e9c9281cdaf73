"""What holds for all tests: without a GPU, Triton interprets its kernels."""

import os
from pathlib import Path

# Of NVIDIA's driver, of AMD's, and of Windows' under Linux.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def pytest_configure() -> None:
    """Choose Triton's mode before anything imports it, which fixes it for the process (model libraries do)."""
    if not any(Path(path).exists() for path in GPU_DEVICES):
        os.environ["TRITON_INTERPRET"] = "1"
