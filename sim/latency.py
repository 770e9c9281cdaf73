"""How long an engine step takes: the models, each with its assumptions spelled out."""

from typing import Any

import attrs

from ..core.errors import InputError
from ..core.types import StepLoad


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} must be a number of seconds, 0 or more, not {value}")


@attrs.frozen
class LinearLatency:
    """`base_s + prefill_token_s * prefill tokens + decode_seq_s * decoding sequences` seconds a step.

    The default coefficients are those under which NVIDIA Dynamo's replay was timed on the conversation trace (5 ms,
    25 us, 20 us): plausible for a 70B-class model on several GPUs, calibrated to none.
    """

    base_s: float = attrs.field(default=5e-3, validator=_not_negative)
    prefill_token_s: float = attrs.field(default=25e-6, validator=_not_negative)
    decode_seq_s: float = attrs.field(default=20e-6, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        if not self.base_s + self.decode_seq_s:
            raise InputError("a step must take time: give base_s or decode_seq_s a value above 0")

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes."""
        return self.base_s + self.prefill_token_s * load.num_prefill_tokens + self.decode_seq_s * load.num_decode_tokens

    def assumptions(self) -> dict[str, Any]:
        """The three coefficients."""
        return {
            "latency_model": "linear: base + per prefill token + per decoding sequence",
            "base_ms": self.base_s * 1e3,
            "us_per_prefill_token": self.prefill_token_s * 1e6,
            "us_per_decoding_sequence": self.decode_seq_s * 1e6,
        }


@attrs.frozen
class RooflineLatency:
    """A step takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed cost.

        compute_s = (2 * active_parameters * tokens + attention_flops) / tp / (peak_flops * compute_efficiency)
        memory_s  = (weight_bytes_read + kv_bytes_read) / tp / (bandwidth * memory_efficiency)
        step_s    = max(compute_s, memory_s) + fixed_s

    with `attention_flops = 4 * layers * heads * head_dim * context_tokens` (scores and values, two operations each) and
    `kv_bytes_read = kv_bytes_per_token * context_tokens` for decoding sequences; a prefill chunk reads its own context
    from near memory and is charged its arithmetic only. The fixed cost is everything that does not shrink with the
    batch: scheduling, launches, sampling, all-reduces (one roofline without it misses most of a small step).
    """

    active_parameters: float
    weight_bytes: float
    kv_bytes_per_token: float
    attention_flops_per_context_token: float
    peak_flops: float
    bandwidth_bytes_per_s: float
    tensor_parallel_size: int = 1
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    fixed_s: float = 4e-3
    source: str = ""

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes."""
        tokens = load.num_tokens
        context = load.prefill_context_tokens + load.decode_context_tokens
        flops = 2 * self.active_parameters * tokens + self.attention_flops_per_context_token * context
        moved = self.weight_bytes + self.kv_bytes_per_token * load.decode_context_tokens
        compute_s = flops / self.tensor_parallel_size / (self.peak_flops * self.compute_efficiency)
        memory_s = moved / self.tensor_parallel_size / (self.bandwidth_bytes_per_s * self.memory_efficiency)
        return max(compute_s, memory_s) + self.fixed_s

    def assumptions(self) -> dict[str, Any]:
        """Every coefficient with its unit, and where the device's figures come from."""
        return {
            "latency_model": "roofline: max(arithmetic, memory traffic) + fixed cost a step",
            "active_parameters": self.active_parameters,
            "weight_bytes_read_per_step": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "peak_tflops_per_gpu": self.peak_flops / 1e12,
            "bandwidth_tb_s_per_gpu": self.bandwidth_bytes_per_s / 1e12,
            "tensor_parallel_size": self.tensor_parallel_size,
            "compute_efficiency": self.compute_efficiency,
            "memory_efficiency": self.memory_efficiency,
            "fixed_ms_per_step": self.fixed_s * 1e3,
            "device_source": self.source,
        }
