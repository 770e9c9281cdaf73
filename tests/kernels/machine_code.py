"""What a compiled kernel's machine code does to memory: widths of global loads and stores, spills, local memory.

NVIDIA: SASS and the resource usage, from the tools that ship with Triton. AMD: the assembly that Triton keeps.
"""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import attrs

# LDG, STG: through a global address. LDGSTS: global to shared, asynchronously. LD, ST: through a generic address.
_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(LDGSTS|LDG|STG|LDL|STL|LD|ST)((?:\.\w+)*)\s", re.MULTILINE)
_SASS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_WIDE_DIVISION = re.compile(r"\bI2F\.U64\.RP\b")
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]+)\*/")
_USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
_AMD = re.compile(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)", re.MULTILINE)
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}
_AMD_PRIVATE = re.compile(r"\.(vgpr_spill_count|private_segment_fixed_size):\s+(\d+)")


@attrs.frozen
class MachineCode:
    """What one kernel does to memory.

    Attributes:
        loads, stores: width in bytes -> how many instructions of that width go to global memory.
        local_accesses: instructions that load or store thread-local memory, and registers spilled to it.
        local_bytes: thread-local memory of a thread, stack included.
        registers: of a thread.
        wide_divisions: places where 64 bits are divided, a subroutine on NVIDIA's cards; not read in AMD's assembly.
        loads_before_product: how many of the loads of 16 bytes stand before the first product of matrices; the same.

    Scalar loads of AMD's kernels (a slot, a scale) go another way and are not counted; nor are its scalar registers
    that spill into lanes of vector registers, which is no memory.
    """

    loads: dict[int, int]
    stores: dict[int, int]
    local_accesses: int
    local_bytes: int
    registers: int
    wide_divisions: int
    loads_before_product: int


def read_cubins(cubins: Sequence[Path], architecture: str, tools: Path) -> list[MachineCode]:
    """The machine code of kernels for one architecture (`SM90a`), each of which is the only one in its file."""
    codes = [instructions_of(path.read_bytes()) for path in cubins]
    sass = disassemble(codes, architecture, tools)
    usages = [_printed(tools / "cuobjdump", "--dump-resource-usage", str(path)) for path in cubins]
    return [parse_sass(text + usage) for text, usage in zip(sass, usages, strict=True)]


def instructions_of(cubin: bytes) -> bytes:
    """The section `.text.<kernel>` of a 64-bit ELF file."""
    (headers_at,) = struct.unpack_from("<Q", cubin, 0x28)
    header_bytes, num_headers, names_number = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each section: its name's place, type, flags, address, offset and size.
    headers = [struct.unpack_from("<IIQQQQ", cubin, headers_at + i * header_bytes) for i in range(num_headers)]
    names_at = headers[names_number][4]
    (found,) = [header for header in headers if cubin.startswith(b".text.", names_at + header[0])]
    return cubin[found[4] : found[4] + found[5]]


def disassemble(codes: Sequence[bytes], architecture: str, tools: Path) -> list[str]:
    """SASS of each piece of code, by one process for all: nearly all of its time is its start."""
    starts = [0, *accumulate(len(code) for code in codes)]
    texts: list[list[str]] = [[] for _ in codes]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        printed = _printed(tools / "nvdisasm", "--binary", architecture, file.name)
    for line in printed.splitlines(keepends=True):
        address = _ADDRESS.match(line)
        if address:
            texts[bisect_right(starts, int(address.group(1), 16)) - 1].append(line)
    return ["".join(text) for text in texts]


def _printed(*command: Path | str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse_sass(text: str) -> MachineCode:
    """SASS, and behind it the resource usage as cuobjdump prints it."""
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    local = 0
    product = text.find("HMMA.")
    before_product = 0
    for match in _SASS.finditer(text):
        opcode, modifiers = match.group(1), match.group(2).split(".")
        if opcode in ("LDL", "STL"):
            local += 1
            continue
        num_bytes = next((_SASS_BYTES[name] for name in modifiers if name in _SASS_BYTES), 4)
        (stores if opcode in ("STG", "ST") else loads)[num_bytes] += 1
        before_product += num_bytes == 16 and opcode == "LDG" and match.start() < product
    usage = {name: int(value) for name, value in _USAGE.findall(text)}
    if "REG" not in usage:
        raise ValueError(f"no resource usage among {len(text)} characters of disassembly")
    local_bytes, divisions = usage["STACK"] + usage["LOCAL"], len(_WIDE_DIVISION.findall(text))
    return MachineCode(dict(loads), dict(stores), local, local_bytes, usage["REG"], divisions, before_product)


def parse_amdgcn(text: str) -> MachineCode:
    """The assembly of one AMD kernel, with the metadata at its end."""
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for kind, suffix in _AMD.findall(text):
        name = suffix.split("_")[0]
        num_bytes = _AMD_BYTES.get(name) or (2 if name in ("ushort", "sshort", "short") else 1)
        (stores if kind == "store" else loads)[num_bytes] += 1
    private = {name: int(value) for name, value in _AMD_PRIVATE.findall(text)}
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    if len(private) < 2 or registers is None:
        raise ValueError(f"no metadata among {len(text)} characters of assembly")
    local = len(re.findall(r"^\s+scratch_(?:load|store)_", text, re.MULTILINE))
    return MachineCode(
        dict(loads),
        dict(stores),
        local + private["vgpr_spill_count"],
        private["private_segment_fixed_size"],
        int(registers.group(1)),
        0,
        0,
    )
