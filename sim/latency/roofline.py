"""Step times from physics: arithmetic, memory traffic and collectives of one GPU, and fixed costs."""

import attrs
import numpy as np

from ...core.deployment.estimates import capture_sizes
from ...core.errors import InputError, positive
from ...core.models.geometry import ModelGeometry
from ...core.planner.parallel import layers_per_stage
from ...core.types import StepLoad
from .devices import Device, DeviceFactors, device_factors
from .models import LatencyInputs, latency_models
from .step_work import StepWork, step_work

# In a step of more tokens, every expert is assumed to be visited.
_MAX_DISTINCT_TOKENS = 1024


@latency_models.register("roofline")
@attrs.frozen(kw_only=True)
class RooflineLatency:
    """A step is the sum of its kernels; each takes as long as the longer of its arithmetic and its memory traffic.

        products   = max(matrix_bytes / W, (tokens + saturation_tokens) * flops_per_token / C)
        experts    = max(distinct * bytes_per_expert / W,
                         (visits + saturation_tokens * distinct) * flops_per_visit / C)
        head       = max(head_bytes / W, (logits + saturation_tokens) * head_flops_per_token / C)
        decoding   = max(tokens attended to * kv_bytes_per_token / K, pairs * decode_flops_per_pair / C)
        prefill    = max(pairs * prefill_flops_per_pair / C, mean context * kv_bytes_per_token / K)
        all_reduce = 2 * layers * (all_reduce_s + tokens * hidden_bytes * 2 (tp - 1) / tp / L)
        layers     = layers * layer_s + expert layers * expert_layer_s
        step       = max(products + ... + layers, uncaptured floor) + step_s + logits * vocabulary * sampler_s

    where logits counts the tokens that are sampled or verified, and W, K, C and L are the bandwidths, the FLOP/s and
    the one-way link that the device reaches: datasheet x efficiency. The floor, `layers * uncaptured_layer_s`, applies
    to steps of more tokens than the largest captured batch.

    Pipeline parallel: `pipeline_parallel_size` micro-batches are in flight, and a step is one round of them, so that
    every request advances once: a micro-batch of the mean size passes all stages at the pace of the longest stage, with
    one hop over the link between neighbours.

    Attributes:
        work: the work of a step on one tensor-parallel rank.
        device: datasheet figures.
        factors: efficiencies of the device, and fixed costs.
        tensor_parallel_size, pipeline_parallel_size: ranks.
        decode_context_parallel_size: ranks that share each request's tokens. What they exchange for it is not counted.
        max_captured_tokens: tokens of the largest batch in a CUDA graph; 0: no batch is captured.
        longest_stage_share: layers of the longest pipeline stage divided by the mean.
        description: of model and dtypes, for `assumptions`.
    """

    work: StepWork
    device: Device
    factors: DeviceFactors
    tensor_parallel_size: int = attrs.field(default=1, validator=positive)
    pipeline_parallel_size: int = attrs.field(default=1, validator=positive)
    decode_context_parallel_size: int = attrs.field(default=1, validator=positive)
    max_captured_tokens: int = 0
    longest_stage_share: float = 1.0
    description: str = ""
    _terms: tuple[tuple[float, ...], ...] = attrs.field(init=False, repr=False, eq=False)
    _attention: tuple[tuple[float, float, float, float], ...] = attrs.field(init=False, repr=False, eq=False)
    _experts: tuple[tuple[float, ...], float, float, float] | None = attrs.field(init=False, repr=False, eq=False)

    @classmethod
    def for_model(
        cls,
        geometry: ModelGeometry,
        device: Device,
        *,
        max_num_seqs: int,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        decode_context_parallel_size: int = 1,
        weights_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        enforce_eager: bool = False,
        factors: DeviceFactors | None = None,
    ) -> "RooflineLatency":
        """The latency model of one server, a `device` each rank.

        `max_num_seqs` decides which batches are captured; none with `enforce_eager`. `weights_dtype` is a dtype, a
        quantization scheme, or `auto`: what the config says. The device's preset is used unless `factors` are given.
        Raises `InputError` if the model's storage or arithmetic is not known, or does not divide over the ranks.
        """
        for name, value in (("max_num_seqs", max_num_seqs), ("tensor_parallel_size", tensor_parallel_size)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        stages = layers_per_stage(geometry.num_hidden_layers, pipeline_parallel_size)
        return cls(
            work=step_work(
                geometry,
                tensor_parallel_size=tensor_parallel_size,
                weights_dtype=weights_dtype,
                kv_cache_dtype=kv_cache_dtype,
                decode_context_parallel_size=decode_context_parallel_size,
            ),
            device=device,
            factors=device_factors(device) if factors is None else factors,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            decode_context_parallel_size=decode_context_parallel_size,
            max_captured_tokens=0 if enforce_eager else capture_sizes(max_num_seqs)[-1],
            longest_stage_share=max(stages) * len(stages) / geometry.num_hidden_layers,
            description=f"{geometry.name}, weights {weights_dtype}, KV cache {kv_cache_dtype}",
        )

    @classmethod
    def from_inputs(cls, inputs: LatencyInputs) -> "RooflineLatency":
        """The latency model of the given deployment on the given device."""
        deployment, device = inputs.deployment, inputs.device
        if deployment is None or device is None:
            raise InputError("--latency roofline needs --model and --gpu: it is computed from both")
        return cls.for_model(
            deployment.geometry,
            device,
            max_num_seqs=deployment.max_num_seqs,
            tensor_parallel_size=deployment.tensor_parallel_size,
            pipeline_parallel_size=deployment.pipeline_parallel_size,
            decode_context_parallel_size=deployment.decode_context_parallel_size,
            weights_dtype=inputs.weights_dtype,
            kv_cache_dtype=deployment.cache_dtype,
            enforce_eager=deployment.enforce_eager,
        )

    def __attrs_post_init__(self) -> None:
        if self.device.bf16_flops is None:
            raise InputError(
                f"the {self.device.name} has no dense bf16 FLOP/s here, which step times need: describe it with --gpu"
                " FILE.toml (tflops.bf16), or give --latency linear or table"
            )
        if self.tensor_parallel_size * self.pipeline_parallel_size > 1 and not self.device.link.bytes_per_s:
            raise InputError(f"the {self.device.name} has no link here, which several GPUs need: give link.gb_s")
        object.__setattr__(self, "_terms", self._precomputed_terms())
        object.__setattr__(self, "_attention", self._precomputed_attention())
        object.__setattr__(self, "_experts", self._precomputed_experts())

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.work.num_layers

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes. It is one flat function over precomputed terms: every engine step calls it."""
        products, layers, around = self._terms
        matrix_s, matrix_token_s, head_s, head_token_s, saturation_tokens = products
        fixed_gpu_s, token_comm_s, state_s, floor_s = layers
        step_s, logit_s, hops_s, token_hop_s = around
        num_prefill, num_decode, prefill_pairs, decode_pairs, sampled, _ = load
        micro_batches = self.pipeline_parallel_size
        if micro_batches != 1:
            num_prefill, prefill_pairs = num_prefill / micro_batches, prefill_pairs / micro_batches
            num_decode, decode_pairs = num_decode / micro_batches, decode_pairs / micro_batches
            sampled = sampled / micro_batches
        tokens = num_prefill + num_decode
        seconds = fixed_gpu_s + tokens * token_comm_s
        compute_s = (tokens + saturation_tokens) * matrix_token_s
        seconds += compute_s if compute_s > matrix_s else matrix_s
        # A sequence that verifies drafts decodes several tokens while its cache is read once.
        logits, readings = sampled, 1.0
        if 0 < sampled < num_decode:
            logits, readings = num_decode, sampled / num_decode
        if logits:
            compute_s = (logits + saturation_tokens) * head_token_s
            seconds += compute_s if compute_s > head_s else head_s
        if self._experts is not None:
            expert_s, all_read_s, token_visits_s, saturation_s = self._experts
            index = int(tokens + 0.5)
            if index < len(expert_s):
                seconds += expert_s[index]
            else:
                compute_s = saturation_s + tokens * token_visits_s
                seconds += compute_s if compute_s > all_read_s else all_read_s
        for window, kv_token_s, decode_pair_s, prefill_pair_s in self._attention:
            if num_decode:
                pairs = decode_pairs if decode_pairs <= window * num_decode else window * num_decode
                compute_s, read_s = pairs * decode_pair_s, pairs * readings * kv_token_s
                seconds += compute_s if compute_s > read_s else read_s
            if num_prefill:
                pairs = prefill_pairs if prefill_pairs <= window * num_prefill else window * num_prefill
                compute_s, read_s = pairs * prefill_pair_s, pairs / num_prefill * kv_token_s
                seconds += compute_s if compute_s > read_s else read_s
        seconds = (seconds + num_decode * readings * state_s) * self.longest_stage_share
        if tokens > self.max_captured_tokens and seconds < floor_s:
            seconds = floor_s
        return seconds + step_s + logits * logit_s + hops_s + tokens * token_hop_s

    def _precomputed_terms(self) -> tuple[tuple[float, ...], ...]:
        work, factors, ranks, stages = self.work, self.factors, self.tensor_parallel_size, self.pipeline_parallel_size
        link = self.device.link.bytes_per_s / 2 * factors.link_efficiency or float("inf")  # one GPU needs none
        all_reduces = 2 * work.num_layers if ranks > 1 else 0
        expert_layers = work.experts.num_layers if work.experts else 0
        matrix_token_s = work.flops_per_token / self.flops(False) + work.eight_bit_flops_per_token / self.flops(True)
        products = (
            work.matrix_bytes / self._weights_bandwidth,
            matrix_token_s,
            work.head_bytes / self._weights_bandwidth,
            work.head_flops_per_token / self.flops(False),
            factors.saturation_tokens,
        )
        fixed_s = work.num_layers * factors.layer_s + expert_layers * factors.expert_layer_s
        layers = (
            fixed_s + all_reduces * factors.all_reduce_s,
            all_reduces * work.all_reduce_bytes_per_token * 2 * (ranks - 1) / ranks / link,
            work.state_bytes_per_sequence / self._kv_bandwidth,
            work.num_layers * factors.uncaptured_layer_s,
        )
        around = (
            factors.step_s,
            work.vocab_size * factors.sampler_s_per_logit,
            (stages - 1) * factors.all_reduce_s,
            (stages - 1) * work.all_reduce_bytes_per_token / link,
        )
        return products, layers, around

    def _precomputed_attention(self) -> tuple[tuple[float, float, float, float], ...]:
        """(window, seconds to read a token's keys and values, seconds per decoding pair, seconds per prompt pair)."""
        return tuple(
            (
                float("inf") if part.window is None else part.window,
                part.kv_bytes_per_token / self._kv_bandwidth,
                part.decode_flops_per_pair / self.flops(False),
                part.prefill_flops_per_pair / self.flops(False),
            )
            for part in self.work.attention
        )

    def _precomputed_experts(self) -> tuple[tuple[float, ...], float, float, float] | None:
        """Seconds by the tokens of a step; and for more tokens: to read all experts, per token, to fill the experts."""
        experts, factors = self.work.experts, self.factors
        if experts is None:
            return None
        read_s = experts.bytes_per_expert / self._weights_bandwidth
        visit_s = experts.flops_per_visit / self.flops(experts.in_eight_bits)
        tokens = np.arange(_MAX_DISTINCT_TOKENS + 1)
        distinct = experts.expected_distinct(tokens, factors.expert_skew)
        visits = tokens * experts.experts_per_token
        seconds = np.maximum(distinct * read_s, (visits + factors.saturation_tokens * distinct) * visit_s)
        return (
            tuple(seconds.tolist()),
            experts.num_experts * read_s,
            experts.experts_per_token * visit_s,
            experts.num_experts * factors.saturation_tokens * visit_s,
        )

    @property
    def _weights_bandwidth(self) -> float:
        return self.device.bandwidth_bytes_per_s * self.factors.weights_bandwidth_efficiency

    @property
    def _kv_bandwidth(self) -> float:
        return self.device.bandwidth_bytes_per_s * self.factors.kv_bandwidth_efficiency

    def flops(self, in_eight_bits: bool) -> float:
        """FLOP/s that a product of many tokens reaches."""
        peak = self.device.fp8_flops if in_eight_bits and self.device.fp8_flops else self.device.bf16_flops
        assert peak is not None  # checked when the model was made
        return peak * self.factors.compute_efficiency

    def assumptions(self) -> dict[str, object]:
        work, device = self.work, self.device
        figures: dict[str, object] = {
            "latency_model": "roofline: sum over kernels of max(arithmetic, memory traffic), collectives, fixed costs",
            "model": self.description,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "device": f"{device.name} ({device.figures})",
            "bandwidth_tb_per_s": device.bandwidth_bytes_per_s / 1e12,
            "bf16_tflops": (device.bf16_flops or 0) / 1e12,
            "fp8_tflops": None if device.fp8_flops is None else device.fp8_flops / 1e12,
            "link": f"{device.link.name}, {device.link.bytes_per_s / 1e9:g} GB/s both ways",
            "matrix_gb_per_rank": work.matrix_bytes / 1e9,
            "head_gb_per_rank": work.head_bytes / 1e9,
            "gflop_per_token_per_rank": (work.flops_per_token + work.eight_bit_flops_per_token) / 1e9,
            "kv_bytes_per_token_per_rank": {_extent(a.window): a.kv_bytes_per_token for a in work.attention},
            "max_captured_tokens": self.max_captured_tokens,
        }
        if self.decode_context_parallel_size > 1:
            figures["decode_context_parallel_size"] = (
                f"{self.decode_context_parallel_size}: a rank reads its share of the tokens; what ranks exchange for it"
                " is not counted"
            )
        if work.experts is not None:
            experts = work.experts
            figures["experts"] = (
                f"{experts.experts_per_token} of {experts.num_experts} a token in {experts.num_layers} layers,"
                f" {experts.bytes_per_expert / 1e9:.3f} GB per rank for one in every layer"
            )
        if work.state_bytes_per_sequence:
            figures["state_bytes_per_sequence_per_rank"] = work.state_bytes_per_sequence
        return {**figures, **self.factors.assumptions()}


def _extent(window: int | None) -> str:
    return "all tokens before" if window is None else f"at most {window:,} tokens"
