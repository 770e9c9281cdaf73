"""What a GPU reaches of its datasheet in an LLM step, and what a step costs besides arithmetic and memory traffic.

One set of factors a GPU type. Those of the H100 were fitted to seven measured servers
(golden/measured_serving.jsonl; `python -m bench.fidelity --refit` repeats the fit); every other device carries them
over, except where a figure of its own is known, and says so in `source`.
"""

from typing import Any

import attrs

from ..core.errors import InputError
from .devices import Device


def _share(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 < value <= 1:
        raise InputError(f"{attribute.name} is {value}; it must be above 0 and at most 1")


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number, 0 or more")


@attrs.frozen(kw_only=True)
class DeviceFactors:
    """Efficiencies (shares of the datasheet's figure) and fixed costs (seconds).

    Attributes:
        compute_efficiency: of the peak FLOP/s, for a matrix product or prefill attention of many tokens.
        saturation_tokens: a matrix product of n tokens takes as long as `n + saturation_tokens` tokens at that
            efficiency: small products fill neither the tiles nor the multiprocessors.
        weights_bandwidth_efficiency: of the memory bandwidth, while weights are read.
        kv_bandwidth_efficiency: the same while decode attention reads the KV cache.
        link_efficiency: of one direction of the link between GPUs.
        layer_s: what the kernels of a layer take besides their traffic: ramp up and down, norms, rotary positions,
            the cache's write, activations.
        expert_layer_s: the same, added for routing, sorting and summing in a layer of experts.
        all_reduce_s: latency of one all-reduce; a layer has two.
        uncaptured_layer_s: the host's launches for a layer where no CUDA graph holds them; a step takes that long at
            least.
        step_s: scheduling, preparing inputs and returning tokens, as far as the GPU waits for it.
        sampler_s_per_logit: sampling, for each sampled token and vocabulary entry (sorting for top-k and top-p).
        expert_skew: exponent of the popularity of experts, `p(i) ~ i ** -expert_skew`; 0: all alike.
        source: where the figures come from.
    """

    compute_efficiency: float = attrs.field(validator=_share)
    saturation_tokens: float = attrs.field(validator=_not_negative)
    weights_bandwidth_efficiency: float = attrs.field(validator=_share)
    kv_bandwidth_efficiency: float = attrs.field(validator=_share)
    link_efficiency: float = attrs.field(validator=_share)
    layer_s: float = attrs.field(validator=_not_negative)
    expert_layer_s: float = attrs.field(validator=_not_negative)
    all_reduce_s: float = attrs.field(validator=_not_negative)
    uncaptured_layer_s: float = attrs.field(validator=_not_negative)
    step_s: float = attrs.field(validator=_not_negative)
    sampler_s_per_logit: float = attrs.field(validator=_not_negative)
    expert_skew: float = attrs.field(validator=_not_negative)
    source: str

    def assumptions(self) -> dict[str, Any]:
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


def expected_factors() -> DeviceFactors:
    """What is expected of a data-centre GPU with NVLink before anything is measured: where every fit starts.

    Round figures: dense products reach two thirds of the peak; large reads 85 % of the bandwidth; a decoder layer is
    about a dozen kernels of 2 to 3 us beyond their traffic; a small all-reduce over NVLink takes 5 to 10 us.
    """
    return DeviceFactors(
        compute_efficiency=0.65,
        saturation_tokens=64.0,
        weights_bandwidth_efficiency=0.85,
        kv_bandwidth_efficiency=0.82,
        link_efficiency=0.6,
        layer_s=35e-6,
        expert_layer_s=50e-6,
        all_reduce_s=8e-6,
        uncaptured_layer_s=200e-6,
        step_s=0.3e-3,
        sampler_s_per_logit=0.3e-9,
        expert_skew=0.8,
        source="expected of a data-centre GPU; nothing measured",
    )


def h100_factors() -> DeviceFactors:
    """Fitted, from `expected_factors` on, to the mean decode steps of seven measured servers; then rounded.

    The steps are of 6 to 33 decoding sequences without prompts, so they tell nothing of `compute_efficiency`,
    `saturation_tokens`, `link_efficiency`, `uncaptured_layer_s` and `expert_skew`, which stay as expected.
    """
    return attrs.evolve(
        expected_factors(),
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


_ALL_REDUCE_S = {"PCIe 4 x16": 25e-6, "Infinity Fabric": 12e-6}
"""Expected where there is no NVLink: a collective goes through host memory, or over another fabric."""


def device_factors(device: Device) -> DeviceFactors:
    """The preset of a GPU type: the H100's factors; on other links an all-reduce takes longer."""
    h100 = h100_factors()
    if device.name == "H100":
        return h100
    all_reduce_s = _ALL_REDUCE_S.get(device.link.name, h100.all_reduce_s)
    return attrs.evolve(
        h100,
        all_reduce_s=all_reduce_s,
        source=f"carried over from the H100 to the {device.name} and not measured there; {h100.source}",
    )
