"""A Triton driver without a device: a call compiles what a launch would run, for any target, and launches nothing.

The binder, the specialization on real strides and pointer alignment, the compiler and the launcher's arguments are
Triton's own, so that what was compiled is what this exact call would run.
"""

from pathlib import Path
from typing import Any

import attrs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Per block, in bytes: what the target's hardware has. A kernel that wants more is refused as on the device.
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
MAX_THREADS = 1024


@attrs.frozen
class Launch:
    """One launch that would have happened.

    Attributes:
        kernel: name of the compiled function.
        grid: program instances along three axes.
        num_warps: of an instance.
        files: the compiler's outputs by their suffix (`cubin`, `ptx`, `hsaco`, `amdgcn`).
        arguments: what the launcher was given for each parameter of the kernel, constants included; a tensor as its
            dtype and shape.
    """

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    files: dict[str, Path]
    arguments: tuple[Any, ...]

    @property
    def binary(self) -> Path:
        """The machine code: NVIDIA's as a binary, AMD's as assembly."""
        return self.files["cubin" if "cubin" in self.files else "amdgcn"]


def _comparable(argument: Any) -> Any:
    return (str(argument.dtype), tuple(argument.shape)) if hasattr(argument, "data_ptr") else argument


class _Utils:
    """What the runtime asks of a device when it loads a binary."""

    def __init__(self, target_name: str) -> None:
        self._target_name = target_name

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills and the most threads of a block: nothing was loaded."""
        return object(), 1, 0, 0, MAX_THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES[self._target_name],
            "multiprocessor_count": 132,
            "max_num_regs": 65_536,
            "warpSize": TARGETS[self._target_name].warp_size,
        }

    def unload_module(self, *_: object) -> None:
        pass


class FakeDriver:
    """Stands where Triton's driver for a device stands, and keeps a list of the launches."""

    def __init__(self, target_name: str) -> None:
        self.target = TARGETS[target_name]
        self.utils = _Utils(target_name)
        self.launches: list[Launch] = []
        launches = self.launches

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                group = get_cache_manager(metadata.hash).get_group(f"{metadata.name}.json")
                self.files = {Path(path).suffix[1:]: Path(path) for path in (group or {}).values()}
                self.metadata = metadata

            def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
                # Packed metadata, launch metadata and two hooks come before the kernel's own arguments.
                given = tuple(_comparable(argument) for argument in arguments[4:])
                name, num_warps = self.metadata.name, self.metadata.num_warps
                launches.append(Launch(name, (x, y, z), num_warps, self.files, given))

        self.launcher_cls = Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def install(target_name: str) -> FakeDriver:
    """Make every further Triton call of this process compile for that target."""
    fake = FakeDriver(target_name)
    driver.set_active(fake)
    return fake
