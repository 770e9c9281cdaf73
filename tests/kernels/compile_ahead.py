"""`python -m tests.kernels.compile_ahead TARGET [heads]`: compiles calls for a target; prints what the code does.

A process of its own for each target: Triton decides at its import whether it interprets, and one compiler must not see
the options of another target.
"""

import json
import sys
from pathlib import Path
from typing import Any

import attrs
from kvledger.kernels import KernelInputError, TritonKernels
from triton import knobs

from .fake_driver import FakeDriver, Launch, install
from .kernel_calls import Call, calls_for
from .machine_code import MachineCode, parse_amdgcn, read_cubins

ARCHITECTURES = {"sm_80": "SM80", "sm_90": "SM90a", "sm_100": "SM100a"}


@attrs.frozen
class Outcome:
    """What a call led to.

    Attributes:
        launches: of the call.
        repeats: whether the same call launches the same a second time. The first call goes through Triton's launcher,
            the second one through the handle that was kept.
        refused: why it launches nothing.
    """

    launches: list[Launch]
    repeats: bool
    refused: str | None = None


def outcome(call: Call, driver: FakeDriver) -> Outcome:
    """Make one call twice."""
    kernels, before = TritonKernels(), len(driver.launches)
    try:
        call(kernels)
    except KernelInputError as refused:
        return Outcome([], True, str(refused))
    first = driver.launches[before:]
    call(kernels)
    return Outcome(first, first == driver.launches[before + len(first) :])


def read_binaries(target_name: str, launches: list[Launch]) -> dict[Path, MachineCode]:
    """Each binary's machine code; calls that differ in strides alone share one."""
    binaries = list(dict.fromkeys(launch.binary for launch in launches))
    if target_name not in ARCHITECTURES:
        return {path: parse_amdgcn(path.read_text()) for path in binaries}
    tools = Path(knobs.nvidia.cuobjdump.path).parent
    return dict(zip(binaries, read_cubins(binaries, ARCHITECTURES[target_name], tools), strict=True))


def report(made: Outcome, codes: dict[Path, MachineCode]) -> dict[str, Any]:
    """One outcome with what the machine code does."""
    if made.refused is not None:
        return {"refused": made.refused}
    launches = [
        {"kernel": launch.kernel, "grid": launch.grid, "num_warps": launch.num_warps}
        | attrs.asdict(codes[launch.binary])
        for launch in made.launches
    ]
    return {"launches": launches, "repeats": made.repeats}


def main(target_name: str, which: str = "") -> None:
    """Print one JSON object: name of the call -> outcome."""
    driver = install(target_name)
    made = {name: outcome(call, driver) for name, call in calls_for(target_name, which).items()}
    codes = read_binaries(target_name, driver.launches)
    print(json.dumps({name: report(each, codes) for name, each in made.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
