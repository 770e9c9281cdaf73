"""The kernels of one step of a model on one rank: measured where the kernel database has them, else by the roofline."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from operator import add

import attrs
import numpy as np

from ...core.models import layer_cache as caches
from ...core.models.geometry import ModelGeometry
from ...core.models.layer_cache import LayerCache
from ...core.models.weights import Groups, QuantizationScheme, WeightGroup, WeightKind
from ...core.planner.cache_dtype import BITS_PER_ELEMENT
from ...core.planner.parallel import kv_heads_per_rank
from .devices import Device
from .kernel_tables import Curve, KernelTables, Surface
from .roofline import RooflineLatency
from .step_work import attention_work, bytes_per_token, weights_format

# Passes over the activations of a token that a layer makes besides its products: norms, rotary positions, the cache's
# write, activation functions; each reads or writes a hidden vector.
_PASSES_PER_LAYER = 10
_REACHED_BANDWIDTH = 0.8  # share of the memory bandwidth of such a pass
# Counts at which a curve that no table has is computed.
_COUNTS = tuple(float(1 << power) for power in range(17))
_LONGEST = float(1 << 22)  # tokens; no context is longer
_LEAST_KERNEL_S = 3e-6
# Matrices whose input is divided over the ranks.
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "fc2", "o_b_proj")
# Projections of a layer that engines run as one product.
_FUSED = ("q_proj", "k_proj", "v_proj")
# The tables of latent attention time a layer with these.
_OF_LATENT_ATTENTION = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")
# Dtypes of the tables for weights of each kind, the best match first. Products of block-scaled weights were timed one
# launch at a time, which took longer than the kernels: the times of the other 8-bit products stand for them.
_GEMM_DTYPES = {"bf16": ("bfloat16",), "fp8": ("fp8",), "fp8_block": ("fp8",), "nvfp4": ("nvfp4",)}
_EXPERT_DTYPES = {
    "bf16": ("bfloat16",),
    # Some tables of per-tensor scales are of kernels that are slower than those of 16 bits: the faster kernel counts.
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4",),
    "int4": ("int4_wo",),
}


@attrs.frozen(kw_only=True, eq=False)
class LayerAttention:
    """Attention of all layers that are alike, on one rank."""

    num_layers: int
    window: int  # the most tokens that a token attends to; 0: all tokens before it
    decode: Surface  # seconds of one layer over (sequences, cached tokens of each)
    prefill: Curve  # seconds of one layer over the tokens of one prompt

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of sequences that decode one token each."""
        return self.num_layers * self.decode.at(num_sequences, context) if num_sequences else 0.0

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Seconds of a prompt's chunk: those of the whole less those of the tokens before it."""
        alone = self.prefill.at(num_tokens)
        if num_before and not (self.window and num_before >= self.window):
            alone = max(alone, self.prefill.at(num_tokens + num_before) - self.prefill.at(num_before))
        return self.num_layers * alone


@attrs.frozen(eq=False)
class AttentionOfLayers:
    """Attention of every layer, kind by kind."""

    layers: tuple[LayerAttention, ...]

    def seconds(self, chunks: Sequence[tuple[int, int]], num_sequences: float, context: float) -> tuple[float, float]:
        """Seconds of the decoding sequences, `context` being their mean length, and of the prompts' chunks."""
        decode_s = sum([layer.decode_s(num_sequences, context) for layer in self.layers])
        return decode_s, sum([layer.prefill_s(*chunk) for layer in self.layers for chunk in chunks])


@attrs.define(kw_only=True, eq=False)
class KernelParts:
    """Collects the kernels of one model on one rank.

    Attributes:
        geometry, device, tables: whose kernels.
        roofline: times what no table has.
        ranks: tensor-parallel ranks of a dense layer, data-parallel ranks, and ranks that hold whole experts.
        kv_cache_dtype: of the cache.
        model_bits, scheme: bits of unquantized weights, and how the others are quantized.
        sources: where the times of each class of kernels come from; filled as they are collected.
    """

    geometry: ModelGeometry
    device: Device
    tables: KernelTables
    roofline: RooflineLatency
    ranks: tuple[int, int, int]
    kv_cache_dtype: str
    model_bits: int
    scheme: QuantizationScheme | None
    sources: dict[str, str] = attrs.field(factory=dict)

    @property
    def dtypes(self) -> str:
        """What the matrices and the experts are made of, such as `bf16+mxfp4`: kernels differ by it."""
        kinds = {self._dtype(group) for group in chain(*self.geometry.weights.layers) if group.kind in _MATRICES}
        return "+".join(sorted(kinds))

    def by_tokens(self) -> dict[str, Curve]:
        """Seconds of all layers over the tokens of a step, by class of kernels."""
        tensor, data, _ = self.ranks
        hidden, layers = self.geometry.hidden_size, self.geometry.num_hidden_layers
        products = self._sum_of_layers(self._products)
        pass_s = hidden * self.model_bits / 8 / (self.device.bandwidth_bytes_per_s * _REACHED_BANDWIDTH)
        found = {"gemm": products, "elementwise": _straight(_PASSES_PER_LAYER * layers * pass_s)}
        self.sources["elementwise"] = "roofline: memory traffic"
        experts = self._sum_of_layers(self._experts)
        if max(experts.seconds):
            found["experts"] = experts
        if tensor * data > 1:
            found["collectives"] = self._collectives(tensor * data)
        return found

    def by_sampled(self) -> Curve:
        """Seconds of the output matrix over the tokens that are sampled."""
        columns = self.geometry.vocab_size // self.ranks[0]
        return self._product("head", "bf16", columns, self.geometry.hidden_size)

    def attention(self) -> AttentionOfLayers:
        """Attention of every layer."""
        kinds: dict[LayerCache, int] = {}
        for cache in chain.from_iterable(self.geometry.layers):
            kinds[cache] = kinds.get(cache, 0) + 1
        layers = [self._attention_of(cache, count) for cache, count in kinds.items()]
        return AttentionOfLayers(tuple(layer for layer in layers if layer is not None))

    def _sum_of_layers(self, of_layer: Callable[[Groups], Curve]) -> Curve:
        """The sum of a curve over all layers; layers with the same matrices are computed once."""
        kinds: dict[Groups, int] = {}
        for layer in self.geometry.weights.layers:
            kinds[layer] = kinds.get(layer, 0) + 1
        return reduce(add, [of_layer(layer) * count for layer, count in kinds.items()])

    def _products(self, layer: Groups) -> Curve:
        """Seconds of a layer's dense products over the tokens of one rank."""
        tensor, hidden = self.ranks[0], self.geometry.hidden_size
        left_out = _OF_LATENT_ATTENTION if self._has_latents(layer) else ()
        found = [_straight(0.0)]
        fused = [group for group in layer if group.name in _FUSED and group.name not in left_out]
        if fused:
            columns = sum(group.width_on_rank(tensor) for group in fused)
            found.append(self._product("gemm", self._dtype(fused[0]), columns, hidden))
        for group in layer:
            if group in fused or group.name in left_out:
                continue
            if group.name == "router":
                found.append(self._product("gemm", "bf16", group.parameters // hidden, hidden))
            elif group.kind in _DENSE and group.width and group.parameters:
                outer, divided = group.parameters // group.width, group.width_on_rank(tensor)
                sizes = (outer, divided) if group.name in _ROW_PARALLEL else (divided, outer)
                found.append(self._product("gemm", self._dtype(group), *sizes))
        return reduce(add, found)

    def _product(self, name: str, dtype: str, columns: int, inner: int) -> Curve:
        for wanted in _GEMM_DTYPES.get(dtype, ()):
            curve = self.tables.gemm(wanted, columns, inner)
            if curve is not None:
                self.sources.setdefault(name, f"measured ({wanted})")
                return curve
        self.sources[name] = f"roofline: no times of {dtype} products"
        bits = {"fp8": 8, "fp8_block": 8, "nvfp4": 4.5, "mxfp4": 4.25, "int4": 4.16}.get(dtype, 16)
        return self._roofline(columns * inner * bits / 8, 2.0 * columns * inner, in_eight_bits=dtype.startswith("fp8"))

    def _experts(self, layer: Groups) -> Curve:
        """Seconds of a layer's routed experts over the tokens of all ranks."""
        down = next((group for group in layer if group.name == "experts.down_proj"), None)
        if down is None:
            return _straight(0.0)
        hidden, (tensor, data, expert_ranks) = self.geometry.hidden_size, self.ranks
        router = next(group for group in layer if group.name == "router")
        num_experts, visited = router.parameters // hidden, router.width // hidden
        inner, ranks = down.width // visited, (tensor * data // expert_ranks, expert_ranks)
        dtype = self._dtype(down)
        curves: list[Curve] = []
        notes: list[str] = []
        for wanted in _EXPERT_DTYPES.get(dtype, ()):
            found = self.tables.experts(wanted, hidden, inner, visited, num_experts, ranks)
            if found is None:
                continue
            curve, measured = found
            notes.append(f"measured ({wanted})")
            if measured != ranks:  # a rank's share of the weights decides; small steps take as long
                notes[-1] += f" on {measured[0]} x {measured[1]} ranks, scaled to {ranks[0]} x {ranks[1]}"
                curve = curve * (measured[0] * measured[1] / (ranks[0] * ranks[1])) ** 0.5
            curves.append(curve)
        if curves:
            self.sources["experts"] = ", or faster ".join(notes)
            return reduce(Curve.least, curves)
        self.sources["experts"] = f"roofline: no times of {num_experts} {dtype} experts of {hidden} x {inner}"
        return self._roofline_experts()

    def _roofline_experts(self) -> Curve:
        work, factors = self.roofline.work.experts, self.roofline.factors
        assert work is not None  # the layer has experts
        distinct = work.expected_distinct(np.array(_COUNTS, dtype=np.int64), factors.expert_skew)
        bandwidth = self.device.bandwidth_bytes_per_s * factors.weights_bandwidth_efficiency
        visit_s = work.flops_per_visit / self.roofline.flops(work.in_eight_bits)
        visits = np.array(_COUNTS) * work.experts_per_token + factors.saturation_tokens * distinct
        seconds = np.maximum(distinct * work.bytes_per_expert / bandwidth, visits * visit_s) / work.num_layers
        share = self.ranks[1] * 1.0  # the roofline divides experts over the tensor-parallel ranks only
        return Curve(_COUNTS, tuple((seconds / share).tolist()))

    def _collectives(self, num_ranks: int) -> Curve:
        """Seconds of two all-reduces a layer over the tokens of all ranks."""
        token_bytes = self.geometry.hidden_size * self.model_bits // 8
        layers = 2 * self.geometry.num_hidden_layers
        curve = self.tables.all_reduce(num_ranks)
        if curve is None:
            self.sources["collectives"] = f"roofline: no times of all-reduces of {num_ranks} ranks"
            link = self.device.link.bytes_per_s / 2 * self.roofline.factors.link_efficiency
            per_byte = 2 * (num_ranks - 1) / num_ranks / link
            return _straight(token_bytes * per_byte * layers, self.roofline.factors.all_reduce_s * layers)
        self.sources["collectives"] = "measured"
        return Curve(tuple(size / token_bytes for size in curve.counts), curve.seconds) * layers

    def _attention_of(self, cache: LayerCache, num_layers: int) -> LayerAttention | None:
        tensor = self.ranks[0]
        heads = self.geometry.fields.integer("num_attention_heads", "n_head") // tensor
        eight_bits = BITS_PER_ELEMENT[self.geometry.cache_format(self.kv_cache_dtype).dtype] == 8
        dtype = "fp8" if eight_bits else "bfloat16"
        window, decode, prefill = 0, None, None
        if isinstance(cache, caches.AttentionCache):
            window = cache.sliding_window or cache.attention_chunk_size or 0
            kv_heads = kv_heads_per_rank(cache.num_kv_heads, tensor)
            decode, prefill = (
                self.tables.attention(phase, heads, kv_heads, cache.head_size, dtype, window)
                for phase in ("generation", "context")
            )
        elif isinstance(cache, caches.LatentCache) and cache.part is caches.CachePart.KV:
            decode, prefill = self._latent_attention(heads, dtype)
        if decode is not None and prefill is not None:
            self.sources.setdefault("attention", f"measured (cache of {dtype})")
            return LayerAttention(num_layers=num_layers, window=window, decode=decode, prefill=prefill.curves[0])
        self.sources["attention"] = f"roofline: no times of {type(cache).__name__} with {heads} heads a rank"
        return self._roofline_attention(cache, num_layers, window)

    def _latent_attention(self, heads: int, dtype: str) -> tuple[Surface | None, Surface | None]:
        """Layers of latent attention with their projections.

        The tables time short decodes by the host's launches; there the sum of the layer's kernels is used.
        """
        gemm = _GEMM_DTYPES.get(self._dtype_of_attention(), ("bfloat16",))[0]
        for wanted in dict.fromkeys((gemm, f"{gemm}_block", "bfloat16")):
            decode = self.tables.latent_attention("generation", heads, dtype, wanted)
            prefill = self.tables.latent_attention("context", heads, dtype, wanted)
            if decode is not None and prefill is not None:
                return self._not_above_its_kernels(decode, heads, 1 if dtype == "fp8" else 2), prefill
        return None, None

    def _not_above_its_kernels(self, decode: Surface, heads: int, element_bytes: int) -> Surface:
        """The surface, nowhere above products plus reading the latents plus the least time of its kernels."""
        latent = self.geometry.fields.integer("kv_lora_rank") + self.geometry.fields.integer("qk_rope_head_dim")
        layer = next(groups for groups in self.geometry.weights.layers if self._has_latents(groups))
        tensor, dtype = self.ranks[0], self._dtype_of_attention()
        products = [_straight(0.0)]
        for group in (group for group in layer if group.name in _OF_LATENT_ATTENTION):
            outer, divided = group.parameters // group.width, group.width_on_rank(tensor)
            products.append(self._product("gemm", dtype, divided, outer))
        product = reduce(add, products)
        read_s = latent * element_bytes / (self.device.bandwidth_bytes_per_s * _REACHED_BANDWIDTH)
        curves = [
            Curve(
                curve.counts,
                tuple(
                    min(seconds, product.at(sequences) + 4 * _LEAST_KERNEL_S + sequences * context * read_s)
                    for context, seconds in zip(curve.counts, curve.seconds, strict=True)
                ),
            )
            for sequences, curve in zip(decode.values, decode.curves, strict=True)
        ]
        return Surface(decode.values, tuple(curves))

    def _roofline_attention(self, cache: LayerCache, num_layers: int, window: int) -> LayerAttention:
        """The roofline's times of one kind of layer; a state is read and written once for each sequence."""
        tensor, storage = self.ranks[0], self.geometry.cache_format(self.kv_cache_dtype)
        kv_bandwidth = self.device.bandwidth_bytes_per_s * self.roofline.factors.kv_bandwidth_efficiency
        sequence_s = token_s = pair_s = 0.0
        if cache.part is caches.CachePart.STATE:
            sequence_s = 2 * bytes_per_token(cache, tensor, storage) / kv_bandwidth
        else:
            (work,) = attention_work(self.geometry, tensor, storage, [cache])
            peak_s = 1 / self.roofline.flops(in_eight_bits=False)
            token_s = max(work.kv_bytes_per_token / kv_bandwidth, work.decode_flops_per_pair * peak_s)
            pair_s = work.prefill_flops_per_pair * peak_s
        longest = float(window) if window else _LONGEST
        decode = {
            (sequences, context): _LEAST_KERNEL_S + sequences * (sequence_s + min(context, longest) * token_s)
            for sequences in (1.0, 4096.0)
            for context in (0.0, longest, 2 * longest)
        }
        prefill = {count: _LEAST_KERNEL_S + count * min(count / 2, longest) * pair_s for count in _COUNTS}
        return LayerAttention(
            num_layers=num_layers, window=window, decode=Surface.of(decode), prefill=Curve.of(prefill)
        )

    def _roofline(self, num_bytes: float, flops: float, in_eight_bits: bool) -> Curve:
        factors = self.roofline.factors
        read_s = num_bytes / (self.device.bandwidth_bytes_per_s * factors.weights_bandwidth_efficiency)
        token_s = flops / self.roofline.flops(in_eight_bits)
        return Curve.of(
            {count: _LEAST_KERNEL_S + max(read_s, (count + factors.saturation_tokens) * token_s) for count in _COUNTS}
        )

    def _dtype(self, group: WeightGroup) -> str:
        """`bf16`, `fp8`, `fp8_block`, `int4`, `nvfp4` or `mxfp4`."""
        if self.scheme is None:
            return "bf16"
        bits = int(self.scheme.bits_of(group, self.model_bits))
        if bits >= 8:
            return "bf16" if bits >= 16 else "fp8_block" if self.scheme.name == "fp8_block" else "fp8"
        name = self.scheme.name
        return name if name in ("nvfp4", "mxfp4") else "nvfp4" if name.startswith("modelopt") else "int4"

    def _dtype_of_attention(self) -> str:
        layers = chain.from_iterable(self.geometry.weights.layers)
        return self._dtype(next(group for group in layers if group.name in _OF_LATENT_ATTENTION))

    @staticmethod
    def _has_latents(layer: Groups) -> bool:
        return any(group.name == "kv_b_proj" for group in layer)


_DENSE = (WeightKind.ATTENTION, WeightKind.MLP)
_MATRICES = (*_DENSE, WeightKind.EXPERT)


def _straight(slope: float, least: float = 0.0) -> Curve:
    """`least + count * slope`."""
    return Curve((0.0, 1.0), (least, least + slope))


def kernel_parts(
    geometry: ModelGeometry, device: Device, ranks: tuple[int, int, int], roofline: RooflineLatency, weights_dtype: str,
    kv_cache_dtype: str,
) -> KernelParts:  # fmt: skip
    """The kernels of a model on one rank; `ranks` as in `KernelParts`.

    Raises InputError: the database is not installed or has no tables of the device, or the weights' dtype is unknown.
    """
    model_bits, scheme = weights_format(geometry, weights_dtype)
    return KernelParts(
        geometry=geometry, device=device, tables=KernelTables.of(device), roofline=roofline, ranks=ranks,
        kv_cache_dtype=kv_cache_dtype, model_bits=model_bits, scheme=scheme,
    )  # fmt: skip
