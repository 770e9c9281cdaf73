"""GPU presets: datasheet figures, and the share of them that an LLM step reaches.

Datasheet figures are upper limits of the hardware; no kernel or engine reaches them. The driver reports less total
memory than the label says; that figure is stated separately, with its source, because the plan starts from it. Give
`--total-memory` if the real figure is known.
"""

import attrs

from ...core.errors import InputError
from ...core.quantities import GIB
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
    bf16_flops: float  # dense bf16 FLOP/s (datasheet)
    fp8_flops: float | None  # dense fp8 FLOP/s (datasheet); None where the device has no fp8 units
    link: Link  # to the other GPUs of a node (datasheet)


_PCIE4 = Link(name="PCIe 4 x16", bytes_per_s=64e9)
_NVLINK3 = Link(name="NVLink 3", bytes_per_s=600e9)
_NVLINK4 = Link(name="NVLink 4", bytes_per_s=900e9)
_NVLINK5 = Link(name="NVLink 5", bytes_per_s=1800e9)
_INFINITY = Link(name="Infinity Fabric", bytes_per_s=896e9)


def _assumed_total(label_gb: int, reported: float, why: str) -> tuple[int, str]:
    return int(label_gb * GIB * reported), f"assumed: {reported:.1%} of {label_gb} GiB ({why})"


_HBM = "stacked memory keeps error correction beside the data; the driver holds back about a percent"
_GDDR = "error correction takes a sixteenth of graphics memory, and the driver some more"


def devices() -> dict[str, Device]:
    """Every preset by its name."""
    h100_total = (85_031_714_816, "read on one H100 80GB (79.19 GiB); 79.65 GiB was read on another")
    h200_total = (150_110_011_392, "read on an H200 (139.80 GiB)")
    # name, GB on the label, (total memory, its source), TB/s, bf16 and fp8 TFLOP/s, link
    presets = (
        ("A10", 24, _assumed_total(24, 0.925, _GDDR), 0.60, 125, None, _PCIE4),
        ("L4", 24, _assumed_total(24, 0.925, _GDDR), 0.30, 121, 242, _PCIE4),
        ("L40S", 48, _assumed_total(48, 0.925, _GDDR), 0.864, 362, 733, _PCIE4),
        ("A100-40GB", 40, _assumed_total(40, 0.99, _HBM), 1.555, 312, None, _NVLINK3),
        ("A100-80GB", 80, _assumed_total(80, 0.99, _HBM), 2.039, 312, None, _NVLINK3),
        ("H100", 80, h100_total, 3.35, 989, 1979, _NVLINK4),
        ("H200", 141, h200_total, 4.8, 989, 1979, _NVLINK4),
        ("B200", 180, _assumed_total(180, 0.99, _HBM), 8.0, 2250, 4500, _NVLINK5),
        ("MI300X", 192, _assumed_total(192, 0.99, _HBM), 5.3, 1307, 2615, _INFINITY),
    )
    return {
        name: Device(name, label_gb, *total, bandwidth * 1e12, bf16 * 1e12, None if fp8 is None else fp8 * 1e12, link)
        for name, label_gb, total, bandwidth, bf16, fp8, link in presets
    }


_ALIASES = {"A100": "A100-80GB", "A100-SXM4-80GB": "A100-80GB", "A100-SXM4-40GB": "A100-40GB", "H100-80GB": "H100"}


def find_device(name: str) -> Device:
    """The preset with that name; case, spaces and an `SXM` suffix do not matter (`h100 80gb`, `NVIDIA H100`).

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


_ALL_REDUCE_S = {"PCIe 4 x16": 25e-6, "Infinity Fabric": 12e-6}
"""Expected without NVLink: a collective goes through host memory, or over another fabric."""


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
    all_reduce_s = _ALL_REDUCE_S.get(device.link.name, h100.all_reduce_s)
    return attrs.evolve(
        h100,
        all_reduce_s=all_reduce_s,
        source=f"carried over from the H100 to the {device.name} and not measured there; {h100.source}",
    )
