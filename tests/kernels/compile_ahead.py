"""`python -m tests.kernels.compile_ahead TARGET`: compiles every call for a target; prints what the machine code does.

A process of its own for each target: Triton decides at its import whether it interprets, and one compiler must not see
the options of another target.
"""

import json
import sys
from typing import Any

import attrs
from kvledger.kernels import KernelInputError, TritonKernels
from triton import knobs

from .fake_driver import FakeDriver, Launch, install
from .kernel_calls import Call, calls_for
from .machine_code import read_machine_code


def report(launch: Launch) -> dict[str, Any]:
    """One launch with what its machine code does."""
    code = read_machine_code(launch.files, knobs.nvidia.cuobjdump.path)
    return {"kernel": launch.kernel, "grid": launch.grid, "num_warps": launch.num_warps, **attrs.asdict(code)}


def outcome(call: Call, driver: FakeDriver) -> dict[str, Any]:
    """The launches of one call, or why it was refused."""
    before = len(driver.launches)
    try:
        call(TritonKernels())
    except KernelInputError as refused:
        return {"refused": str(refused)}
    return {"launches": [report(launch) for launch in driver.launches[before:]]}


def main(target_name: str) -> None:
    """Print one JSON object: name of the call -> outcome."""
    driver = install(target_name)
    print(json.dumps({name: outcome(call, driver) for name, call in calls_for(target_name).items()}))


if __name__ == "__main__":
    main(sys.argv[1])
