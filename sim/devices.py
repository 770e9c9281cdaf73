"""Device presets: datasheet figures, named as such. They are ceilings of the hardware, not what a kernel or an
engine reaches.

What the driver reports as total memory is less than the label; it is a figure of its own with its source, since the
plan starts from it. Give `--total-memory` where the real figure is known.
"""

import attrs

from ..core.errors import InputError
from ..core.quantities import GIB


@attrs.frozen(kw_only=True)
class Link:
    """How GPUs of one node reach each other.

    Attributes:
        name: of the interconnect.
        bytes_per_s: per GPU, both directions together as datasheets give it; each way is half of it.
    """

    name: str
    bytes_per_s: float


@attrs.frozen(kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: as `--gpu` takes it.
        label_gb: memory on the label, in the vendor's GB.
        total_bytes: what the driver reports, or an assumption about it.
        total_source: which of the two, and where from.
        bandwidth_bytes_per_s: memory bandwidth (datasheet).
        bf16_flops: dense bf16 FLOP/s (datasheet).
        fp8_flops: dense fp8 FLOP/s (datasheet); None where the device has no fp8 units.
        link: to the other GPUs of a node (datasheet).
    """

    name: str
    label_gb: int
    total_bytes: int
    total_source: str
    bandwidth_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link: Link


_PCIE4 = Link(name="PCIe 4 x16", bytes_per_s=64e9)
_NVLINK3 = Link(name="NVLink 3", bytes_per_s=600e9)
_NVLINK4 = Link(name="NVLink 4", bytes_per_s=900e9)
_NVLINK5 = Link(name="NVLink 5", bytes_per_s=1800e9)
_INFINITY = Link(name="Infinity Fabric", bytes_per_s=896e9)


def _assumed_total(label_gb: int, share: float, why: str) -> tuple[int, str]:
    return int(label_gb * GIB * share), f"assumed: {share:.1%} of {label_gb} GiB ({why})"


_HBM = "stacked memory keeps error correction beside the data; the driver holds back about a percent"
_GDDR = "error correction takes a sixteenth of graphics memory, and the driver some more"


def _device(
    name: str,
    label_gb: int,
    total: tuple[int, str],
    terabytes_per_s: float,
    bf16_teraflops: float,
    fp8_teraflops: float | None,
    link: Link,
) -> Device:
    return Device(
        name=name,
        label_gb=label_gb,
        total_bytes=total[0],
        total_source=total[1],
        bandwidth_bytes_per_s=terabytes_per_s * 1e12,
        bf16_flops=bf16_teraflops * 1e12,
        fp8_flops=None if fp8_teraflops is None else fp8_teraflops * 1e12,
        link=link,
    )


def devices() -> dict[str, Device]:
    """Every preset by its name."""
    h100_total = (85_031_714_816, "read on one H100 80GB (79.19 GiB); 79.65 GiB was read on another")
    h200_total = (150_110_011_392, "read on an H200 (139.80 GiB)")
    presets = (
        _device("A10", 24, _assumed_total(24, 0.925, _GDDR), 0.60, 125, None, _PCIE4),
        _device("L4", 24, _assumed_total(24, 0.925, _GDDR), 0.30, 121, 242, _PCIE4),
        _device("L40S", 48, _assumed_total(48, 0.925, _GDDR), 0.864, 362, 733, _PCIE4),
        _device("A100-40GB", 40, _assumed_total(40, 0.99, _HBM), 1.555, 312, None, _NVLINK3),
        _device("A100-80GB", 80, _assumed_total(80, 0.99, _HBM), 2.039, 312, None, _NVLINK3),
        _device("H100", 80, h100_total, 3.35, 989, 1979, _NVLINK4),
        _device("H200", 141, h200_total, 4.8, 989, 1979, _NVLINK4),
        _device("B200", 180, _assumed_total(180, 0.99, _HBM), 8.0, 2250, 4500, _NVLINK5),
        _device("MI300X", 192, _assumed_total(192, 0.99, _HBM), 5.3, 1307, 2615, _INFINITY),
    )
    return {device.name: device for device in presets}


_ALIASES = {"A100": "A100-80GB", "A100-SXM4-80GB": "A100-80GB", "A100-SXM4-40GB": "A100-40GB", "H100-80GB": "H100"}


def find_device(name: str) -> Device:
    """The preset of that name; case, spaces and an `SXM` suffix do not matter (`h100 80gb`, `NVIDIA H100`).

    Raises:
        InputError: no preset of that name.
    """
    wanted = name.strip().upper().replace(" ", "-").removeprefix("NVIDIA-").removeprefix("AMD-")
    wanted = wanted.removesuffix("-HBM3").removesuffix("-SXM").removesuffix("-SXM5")
    presets = {known.upper(): device for known, device in devices().items()}
    alias = {known.upper(): target for known, target in _ALIASES.items()}.get(wanted, wanted)
    device = presets.get(alias.upper())
    if device is None:
        raise InputError(
            f"--gpu {name!r} is no preset; known are {', '.join(devices())}. For any other device give --total-memory"
        )
    return device
