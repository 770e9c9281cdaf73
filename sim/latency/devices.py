"""GPUs by name or by figures: datasheet figures, and the share of them that an LLM step reaches.

Datasheet figures are upper limits of the hardware; no kernel or engine reaches them. The driver reports less total
memory than the label says; that figure is stated separately, with its source, because the plan starts from it. Give
`--total-memory` if the real figure is known. A GPU without a preset is described in a TOML file (`read_device`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.quantities import GIB, parse_bytes
from ..figures import not_negative, share


@attrs.frozen
class Link:
    """The interconnect between the GPUs of one node."""

    name: str
    bytes_per_s: float  # per GPU, both directions together as in datasheets; one direction is half of it


@attrs.frozen
class Device:
    """One accelerator."""

    name: str  # as `--gpu` takes it
    label_gb: int  # memory on the label, in the vendor's GB
    total_bytes: int  # total memory that the driver reports, or an assumption about it
    total_source: str  # which of the two, and its source
    bandwidth_bytes_per_s: float  # memory bandwidth (datasheet)
    bf16_flops: float | None  # dense bf16 FLOP/s (datasheet); None where no datasheet gives them
    fp8_flops: float | None  # dense fp8 FLOP/s (datasheet); None where the device has no fp8 units
    link: Link  # to the other GPUs of a node (datasheet)
    cuda_capability: int | None = None  # ten times the compute capability; 0: no CUDA; None: not known
    figures_source: str = "datasheet"  # where bandwidth, FLOP/s and link come from
    is_described: bool = False  # whether a file gave the figures, so that nothing was ever measured on it

    @property
    def figures(self) -> str:
        """What its figures are worth."""
        return f"not calibrated: {self.figures_source}" if self.is_described else "datasheet ceilings"


_PCIE4 = Link(name="PCIe 4 x16", bytes_per_s=64e9)
_PCIE5 = Link(name="PCIe 5 x16", bytes_per_s=128e9)
_NVLINK3 = Link(name="NVLink 3", bytes_per_s=600e9)
_NVLINK4 = Link(name="NVLink 4", bytes_per_s=900e9)
_NVLINK5 = Link(name="NVLink 5", bytes_per_s=1800e9)
_INFINITY = Link(name="Infinity Fabric", bytes_per_s=896e9)
_INFINITY4 = Link(name="Infinity Fabric", bytes_per_s=1075.2e9)
_CONNECTX7 = Link(name="ConnectX-7 200GbE", bytes_per_s=50e9)


def _assumed_total(label_gb: int, reported: float, why: str) -> tuple[int, str]:
    return int(label_gb * GIB * reported), f"assumed: {reported:.1%} of {label_gb} GiB ({why})"


_HBM = "stacked memory keeps error correction beside the data; the driver holds back about a percent"
_GDDR = "error correction takes a sixteenth of graphics memory, and the driver some more"
_DRIVER = "the driver holds back about two percent"
_ULTRA = "part of the eight stacks of 36 GB is not usable; HGX and NVL72 datasheets give less than 288 GB a GPU"
_UNIFIED = "the CPU and the operating system use the same memory"


def devices() -> dict[str, Device]:
    """Every preset by its name."""
    h100_total = (85_031_714_816, "read on one H100 80GB (79.19 GiB); 79.65 GiB was read on another")
    h200_total = (150_110_011_392, "read on an H200 (139.80 GiB)")
    # name, GB on the label, (total memory, its source), TB/s, dense bf16 and fp8 TFLOP/s (with fp32 sums), link, ten
    # times the compute capability. B300, GB200 and GB300 are a GPU's share of the datasheet of HGX or NVL72.
    presets = (
        ("A10", 24, _assumed_total(24, 0.925, _GDDR), 0.60, 125, None, _PCIE4, 86),
        ("A10G", 24, _assumed_total(24, 0.925, _GDDR), 0.60, 70, None, _PCIE4, 86),
        ("L4", 24, _assumed_total(24, 0.925, _GDDR), 0.30, 121, 242, _PCIE4, 89),
        ("L20", 48, _assumed_total(48, 0.925, _GDDR), 0.864, 119.5, 239, _PCIE4, 89),
        ("L40S", 48, _assumed_total(48, 0.925, _GDDR), 0.864, 362, 733, _PCIE4, 89),
        ("RTX-4090", 24, _assumed_total(24, 0.98, _DRIVER), 1.008, 165.2, 330.3, _PCIE4, 89),
        ("RTX-5090", 32, _assumed_total(32, 0.98, _DRIVER), 1.792, 209.5, 419, _PCIE5, 120),
        ("RTX-PRO-6000", 96, _assumed_total(96, 0.98, _DRIVER), 1.792, 503.8, 1007.6, _PCIE5, 120),
        ("GB10", 128, _assumed_total(128, 0.935, _UNIFIED), 0.273, None, None, _CONNECTX7, 121),
        ("A100-40GB", 40, _assumed_total(40, 0.99, _HBM), 1.555, 312, None, _NVLINK3, 80),
        ("A100-80GB", 80, _assumed_total(80, 0.99, _HBM), 2.039, 312, None, _NVLINK3, 80),
        ("H20", 96, _assumed_total(96, 0.99, _HBM), 4.0, 148, 296, _NVLINK4, 90),
        ("H100", 80, h100_total, 3.35, 989, 1979, _NVLINK4, 90),
        ("H200", 141, h200_total, 4.8, 989, 1979, _NVLINK4, 90),
        ("B200", 180, _assumed_total(180, 0.99, _HBM), 8.0, 2250, 4500, _NVLINK5, 100),
        ("GB200", 186, _assumed_total(186, 0.99, _HBM), 8.0, 2500, 5000, _NVLINK5, 100),
        ("B300", 288, _assumed_total(288, 0.93, _ULTRA), 8.0, 2250, 4500, _NVLINK5, 103),
        ("GB300", 288, _assumed_total(288, 0.93, _ULTRA), 8.0, 2500, 5000, _NVLINK5, 103),
        ("MI300X", 192, _assumed_total(192, 0.99, _HBM), 5.3, 1307, 2615, _INFINITY, 0),
        ("MI325X", 256, _assumed_total(256, 0.99, _HBM), 6.0, 1307, 2615, _INFINITY, 0),
        ("MI355X", 288, _assumed_total(288, 0.99, _HBM), 8.0, 2517, 5033, _INFINITY4, 0),
    )
    return {
        name: Device(
            name=name,
            label_gb=label_gb,
            total_bytes=total[0],
            total_source=total[1],
            bandwidth_bytes_per_s=bandwidth * 1e12,
            bf16_flops=None if bf16 is None else bf16 * 1e12,
            fp8_flops=None if fp8 is None else fp8 * 1e12,
            link=link,
            cuda_capability=capability,
        )
        for name, label_gb, total, bandwidth, bf16, fp8, link, capability in presets
    }


_ALIASES = {
    "A100": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "H100-80GB": "H100",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "RTX-PRO-6000-BLACKWELL": "RTX-PRO-6000",
    "RTX-PRO-6000-BLACKWELL-WORKSTATION-EDITION": "RTX-PRO-6000",
    "DGX-SPARK": "GB10",
}


def find_device(name: str) -> Device:
    """The preset with that name, or the device that a TOML file describes.

    Case, spaces and an `SXM` suffix do not matter (`h100 80gb`, `NVIDIA H100`). A name that ends in `.toml` is a file.

    Raises:
        InputError: no preset of that name, or a file that does not describe a device.
    """
    if name.endswith(".toml"):
        return read_device(name)
    wanted = re.sub(r"[ _]+", "-", name.strip().upper())
    wanted = wanted.removeprefix("NVIDIA-").removeprefix("AMD-").removeprefix("GEFORCE-").removeprefix("INSTINCT-")
    wanted = wanted.removesuffix("-HBM3").removesuffix("-SXM").removesuffix("-SXM5")
    wanted = re.sub(r"^RTX(?=\d)", "RTX-", wanted)
    presets = {known.upper(): device for known, device in devices().items()}
    alias = {known.upper(): target for known, target in _ALIASES.items()}.get(wanted, wanted)
    device = presets.get(alias.upper())
    if device is None:
        raise InputError(
            f"--gpu {name!r} is no preset; known are {', '.join(devices())}. For any other device give --total-memory,"
            " which is enough for a plan, or a file with its figures (--gpu FILE.toml; see docs/planning.md)"
        )
    return device


_FIELDS = ("name", "memory", "bandwidth_gb_s", "tflops", "link", "cuda_capability", "source")


def read_device(path: str) -> Device:
    """A device from a TOML file with its figures.

        name = "GB10"
        memory = "119.7GiB"                       # total memory that the driver reports
        bandwidth_gb_s = 273                      # GB/s (10^9) of its memory
        tflops = {bf16 = 100, fp8 = 200}          # dense; fp8 only where it has such units
        link = {name = "ConnectX-7", gb_s = 50}   # both directions together; needed with several GPUs
        cuda_capability = "12.1"                  # optional; decides the layout of some caches
        source = "datasheet of 2025-10; bf16 measured with large matrix products"

    Raises:
        InputError: the file cannot be read, a field is missing, unknown, or of another type.
    """
    import tomllib

    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--gpu {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--gpu {path}: not a TOML document: {error}") from error
    unknown = sorted(set(document) - set(_FIELDS))
    if unknown:
        raise InputError(f"--gpu {path}: unknown field {unknown[0]}; known are {', '.join(_FIELDS)}")
    name, source = _text(document, "name", path), _text(document, "source", path)
    memory = document.get("memory")
    if memory is None:
        raise InputError(f'--gpu {path}: missing memory, the total that the driver reports, such as "119.7GiB"')
    total_bytes = memory if isinstance(memory, int) else parse_bytes(str(memory), f"--gpu {path}: memory")
    tflops, link = _table(document, "tflops", path), _table(document, "link", path)
    bf16, fp8 = (_number(tflops, dtype, path, f"tflops.{dtype}") for dtype in ("bf16", "fp8"))
    bandwidth = _number(document, "bandwidth_gb_s", path)
    if bandwidth is None:
        raise InputError(f"--gpu {path}: missing bandwidth_gb_s, the GB/s of its memory")
    link_gb_s = _number(link, "gb_s", path, "link.gb_s")
    return Device(
        name=name,
        label_gb=round(total_bytes / GIB),
        total_bytes=total_bytes,
        total_source=f"{source} ({Path(path).name})",
        bandwidth_bytes_per_s=bandwidth * 1e9,
        bf16_flops=None if bf16 is None else bf16 * 1e12,
        fp8_flops=None if fp8 is None else fp8 * 1e12,
        link=_NO_LINK if link_gb_s is None else Link(str(link.get("name", "link")), link_gb_s * 1e9),
        cuda_capability=_capability(document, path),
        figures_source=source,
        is_described=True,
    )


_NO_LINK = Link(name="none given", bytes_per_s=0.0)


def _text(document: Mapping[str, Any], field: str, path: str) -> str:
    value = document.get(field)
    if not isinstance(value, str) or not value.strip():
        wanted = "where the figures come from" if field == "source" else "what reports call the device"
        raise InputError(f"--gpu {path}: {field} is {value!r}; it must be a text that says {wanted}")
    return value.strip()


def _table(document: Mapping[str, Any], field: str, path: str) -> Mapping[str, Any]:
    known = {"tflops": ("bf16", "fp8"), "link": ("name", "gb_s")}[field]
    value = document.get(field, {})
    if not isinstance(value, Mapping) or set(value) - set(known):
        raise InputError(f"--gpu {path}: {field} is {value!r}; it must be a table of {' and '.join(known)}")
    return value


def _number(document: Mapping[str, Any], field: str, path: str, shown: str = "") -> float | None:
    value = document.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"--gpu {path}: {shown or field} is {value!r}; it must be a number above 0")
    return float(value)


def _capability(document: Mapping[str, Any], path: str) -> int | None:
    value = document.get("cuda_capability")
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    if match is None:
        raise InputError(f'--gpu {path}: cuda_capability is {value!r}; it must be a version such as "12.1"')
    return int(match[1]) * 10 + int(match[2])


@attrs.frozen(kw_only=True)
class DeviceFactors:
    """What a GPU reaches in an LLM step: efficiencies (shares of the datasheet's figure) and fixed costs (seconds).

    The defaults are expected of a data-centre GPU with NVLink. Round figures: dense products reach two thirds of the
    peak; large reads 85 % of the bandwidth; a decoder layer is about a dozen kernels of 2 to 3 us beyond their traffic;
    a small all-reduce over NVLink takes 5 to 10 us.

    Attributes:
        compute_efficiency: share of the peak FLOP/s, for a matrix product or prefill attention of many tokens.
        saturation_tokens: a matrix product of n tokens takes as long as `n + saturation_tokens` tokens at that
            efficiency: small products fill neither the tiles nor the multiprocessors.
        weights_bandwidth_efficiency: share of the memory bandwidth while weights are read.
        kv_bandwidth_efficiency: the same while decode attention reads the KV cache.
        link_efficiency: share of one direction of the link between GPUs.
        layer_s: time of a layer's kernels besides their traffic: ramp up and down, norms, rotary positions, the
            cache's write, activations.
        expert_layer_s: the same, added for routing, sorting and summing in a layer of experts.
        all_reduce_s: latency of one all-reduce; a layer has two.
        uncaptured_layer_s: the host's launches for a layer that no CUDA graph holds; a step takes at least that long.
        step_s: scheduling, preparing inputs and returning tokens, as far as the GPU waits for it.
        sampler_s_per_logit: sampling, per sampled token and vocabulary entry (sorting for top-k and top-p).
        expert_skew: exponent of the popularity of experts, `p(i) ~ i ** -expert_skew`; 0: all equally popular.
        source: where the figures come from.
    """

    compute_efficiency: float = attrs.field(default=0.65, validator=share)
    saturation_tokens: float = attrs.field(default=64.0, validator=not_negative)
    weights_bandwidth_efficiency: float = attrs.field(default=0.85, validator=share)
    kv_bandwidth_efficiency: float = attrs.field(default=0.82, validator=share)
    link_efficiency: float = attrs.field(default=0.6, validator=share)
    layer_s: float = attrs.field(default=35e-6, validator=not_negative)
    expert_layer_s: float = attrs.field(default=50e-6, validator=not_negative)
    all_reduce_s: float = attrs.field(default=8e-6, validator=not_negative)
    uncaptured_layer_s: float = attrs.field(default=200e-6, validator=not_negative)
    step_s: float = attrs.field(default=0.3e-3, validator=not_negative)
    sampler_s_per_logit: float = attrs.field(default=0.3e-9, validator=not_negative)
    expert_skew: float = attrs.field(default=0.8, validator=not_negative)
    source: str = "expected of a data-centre GPU; nothing measured"

    def assumptions(self) -> dict[str, object]:
        """Every factor with its unit in the name."""
        return {
            "compute_efficiency": self.compute_efficiency,
            "saturation_tokens": self.saturation_tokens,
            "weights_bandwidth_efficiency": self.weights_bandwidth_efficiency,
            "kv_bandwidth_efficiency": self.kv_bandwidth_efficiency,
            "link_efficiency": self.link_efficiency,
            "us_per_layer": self.layer_s * 1e6,
            "us_per_expert_layer": self.expert_layer_s * 1e6,
            "us_per_all_reduce": self.all_reduce_s * 1e6,
            "us_per_uncaptured_layer": self.uncaptured_layer_s * 1e6,
            "fixed_ms_per_step": self.step_s * 1e3,
            "sampler_ns_per_logit": self.sampler_s_per_logit * 1e9,
            "expert_skew": self.expert_skew,
            "factors_source": self.source,
        }


def _all_reduce_s(link: Link) -> float | None:
    """Expected latency without NVLink, where collectives go through host memory or over another fabric; else None."""
    name = link.name.lower()
    if "infinity" in name:
        return 12e-6
    return None if "nvlink" in name else 25e-6


def device_factors(device: Device) -> DeviceFactors:
    """The factors of a GPU type: those of the H100, with a longer all-reduce on other links.

    The H100's are the expected ones fitted to the mean decode steps of seven measured servers, then rounded. The steps
    have 6 to 33 decoding sequences and no prompts, so they say nothing about `compute_efficiency`, `saturation_tokens`,
    `link_efficiency`, `uncaptured_layer_s` and `expert_skew`, which stay as expected.
    """
    h100 = DeviceFactors(
        weights_bandwidth_efficiency=0.83,
        kv_bandwidth_efficiency=0.824,
        layer_s=28.6e-6,
        expert_layer_s=83e-6,
        all_reduce_s=4.9e-6,
        step_s=0.263e-3,
        sampler_s_per_logit=0.232e-9,
        source=(
            "H100: bandwidth efficiencies, us per layer, expert layer and all-reduce, fixed ms and sampler fitted to 12"
            " mean decode steps of 7 vLLM 0.15.1 servers (golden/measured_serving.jsonl); the others expected, not"
            " measured"
        ),
    )
    if device.name == "H100":
        return h100
    all_reduce_s = _all_reduce_s(device.link) or h100.all_reduce_s
    label = f"not calibrated: {device.name} by figures of {device.figures_source}; factors " * device.is_described
    return attrs.evolve(
        h100,
        all_reduce_s=all_reduce_s,
        source=f"{label}carried over from the H100 to the {device.name} and not measured there; {h100.source}",
    )
