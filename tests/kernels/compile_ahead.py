"""`python -m tests.kernels.compile_ahead TARGET`: compiles every call for a target; prints what the machine code does.

A process of its own for each target: Triton decides at its import whether it interprets, and one compiler must not see
the options of another target.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from kvledger.kernels import KernelInputError, TritonKernels
from triton import knobs

from .fake_driver import FakeDriver, Launch, install
from .kernel_calls import Call, calls_for
from .machine_code import MachineCode, read_machine_code


def code_reader() -> Callable[[Launch], MachineCode]:
    """Reads each binary once: calls that differ in strides alone share one, and disassembling takes longest."""
    known: dict[Path, MachineCode] = {}

    def read(launch: Launch) -> MachineCode:
        binary = next(path for suffix, path in launch.files.items() if suffix in ("cubin", "amdgcn"))
        if binary not in known:
            known[binary] = read_machine_code(launch.files, knobs.nvidia.cuobjdump.path)
        return known[binary]

    return read


def report(launch: Launch, code: MachineCode) -> dict[str, Any]:
    """One launch with what its machine code does."""
    return {"kernel": launch.kernel, "grid": launch.grid, "num_warps": launch.num_warps, **attrs.asdict(code)}


def outcome(call: Call, driver: FakeDriver, read: Callable[[Launch], MachineCode]) -> dict[str, Any]:
    """The launches of one call, or why it was refused; and whether the same call launches the same a second time.

    The first call goes through Triton's launcher, the second one through the handle that was kept.
    """
    kernels, before = TritonKernels(), len(driver.launches)
    try:
        call(kernels)
    except KernelInputError as refused:
        return {"refused": str(refused)}
    first = driver.launches[before:]
    call(kernels)
    second = driver.launches[before + len(first) :]
    return {"launches": [report(launch, read(launch)) for launch in first], "repeats": first == second}


def main(target_name: str) -> None:
    """Print one JSON object: name of the call -> outcome."""
    driver, read = install(target_name), code_reader()
    print(json.dumps({name: outcome(call, driver, read) for name, call in calls_for(target_name).items()}))


if __name__ == "__main__":
    main(sys.argv[1])
