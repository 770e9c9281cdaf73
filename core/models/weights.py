"""The parameters of a model, matrix by matrix, and the bytes that they take under quantisation and tensor parallelism.

Counts are those of the architectures themselves (golden/model_geometry.jsonl). Each group also gives the width of its
activations, since the peak of a step follows from the same matrices.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Any, cast

import attrs

from ..errors import InputError
from ..planner.cache_dtype import BITS_PER_ELEMENT, canonical_dtype
from ..planner.parallel import kv_heads_per_rank


class WeightKind(StrEnum):
    """The kind of a group of parameters; quantisation schemes choose by it."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    OTHER = "other"  # norms, biases, routers, gates: never quantised


class Sharding(StrEnum):
    """How tensor parallelism divides a group."""

    SPLIT = "split"
    KV_HEADS = "kv_heads"  # split over KV heads, replicated once there are more ranks than heads
    REPLICATED = "replicated"


@attrs.frozen(kw_only=True)
class WeightGroup:
    """Parameters of one matrix (or of a few that are alike)."""

    name: str  # the matrix
    parameters: int  # number of parameters in the whole group
    kind: WeightKind  # decides whether a scheme quantises it
    sharding: Sharding = Sharding.SPLIT  # how ranks share it
    num_kv_heads: int | None = None  # KV heads of a `KV_HEADS` group
    # Activation elements per token: the output of a column-parallel matrix, the input of a row-parallel one. Divided
    # like the parameters. For experts: of those that one token visits.
    width: int = 0
    expert_sizes: tuple[int, int] | None = None  # of an expert's matrices: hidden and intermediate size

    def on_rank(self, tensor_parallel_size: int) -> int:
        """Parameters that one tensor-parallel rank holds.

        Raises:
            InputError: KV heads that can be neither split nor replicated evenly.
        """
        return self._shard(self.parameters, tensor_parallel_size)

    def width_on_rank(self, tensor_parallel_size: int) -> int:
        """Activation elements per token on one rank."""
        return self._shard(self.width, tensor_parallel_size)

    def _shard(self, amount: int, tensor_parallel_size: int) -> int:
        if self.sharding is Sharding.REPLICATED:
            return amount
        if self.sharding is Sharding.KV_HEADS and self.num_kv_heads is not None:
            return amount // self.num_kv_heads * kv_heads_per_rank(self.num_kv_heads, tensor_parallel_size)
        return -(-amount // tensor_parallel_size)


Groups = tuple[WeightGroup, ...]


@attrs.frozen(kw_only=True)
class ModelWeights:
    """All parameters of a model, in the order of its layers."""

    embeddings: Groups  # on the first pipeline stage
    layers: tuple[Groups, ...]  # on the stage of the layer
    head: Groups  # final norm and output matrix, on the last stage
    tied: bool  # whether the output matrix is the input embedding; a last stage that is not the first holds a copy

    @property
    def all_groups(self) -> Iterable[WeightGroup]:
        """Every group once."""
        yield from self.embeddings
        for layer in self.layers:
            yield from layer
        yield from self.head

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, tied ones once."""
        return sum(group.parameters for group in self.all_groups)

    def on_stage(self, first_layer: int, num_layers: int) -> Groups:
        """Groups of one pipeline stage, before tensor parallelism."""
        is_first = first_layer == 0
        is_last = first_layer + num_layers == len(self.layers)
        groups: list[WeightGroup] = []
        if is_first or (is_last and self.tied):
            groups.extend(self.embeddings if is_first else (g for g in self.embeddings if g.name == "embed_tokens"))
        for layer in self.layers[first_layer : first_layer + num_layers]:
            groups.extend(layer)
        if is_last:
            groups.extend(self.head)
        return tuple(groups)


def column(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix whose output is divided over ranks."""
    return WeightGroup(name=name, parameters=size_in * size_out, kind=kind, width=size_out)


def row(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix whose input is divided over ranks."""
    return WeightGroup(name=name, parameters=size_in * size_out, kind=kind, width=size_in)


def whole(name: str, kind: WeightKind, size_in: int, size_out: int) -> WeightGroup:
    """A matrix that every rank holds."""
    return WeightGroup(
        name=name, parameters=size_in * size_out, kind=kind, sharding=Sharding.REPLICATED, width=size_out
    )


def vector(name: str, parameters: int) -> WeightGroup:
    """Norm weights, biases and other parameters that every rank holds in full precision."""
    return WeightGroup(name=name, parameters=parameters, kind=WeightKind.OTHER, sharding=Sharding.REPLICATED)


@attrs.frozen(kw_only=True)
class Heads:
    """Query heads, KV heads, and the sizes of a key and a value vector."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int


def attention_projections(
    hidden_size: int,
    heads: Heads,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: int = 0,
    shared_kv: bool = False,
    value_is_key: bool = False,
) -> Groups:
    """Projections, biases and norms of an attention with separate queries, keys and values.

    `qk_norm` counts parameters of query and key norms. With `shared_kv` it reads another layer's keys and values and
    projects none; with `value_is_key` the key projection also gives the values.
    """
    kind = WeightKind.ATTENTION
    query_width = heads.num_heads * heads.head_size
    groups = [column("q_proj", kind, hidden_size, query_width)]
    projected = () if shared_kv else ("k_proj",) if value_is_key else ("k_proj", "v_proj")
    for name, size in zip(projected, (heads.head_size, heads.head_size_v), strict=False):
        of_heads = column(name, kind, hidden_size, heads.num_kv_heads * size)
        groups.append(attrs.evolve(of_heads, sharding=Sharding.KV_HEADS, num_kv_heads=heads.num_kv_heads))
    groups.append(row("o_proj", kind, heads.num_heads * heads.head_size_v, hidden_size))
    extra = qk_norm + (hidden_size if output_bias else 0)
    extra += (query_width + heads.num_kv_heads * (heads.head_size + heads.head_size_v)) if qkv_bias else 0
    return (*groups, vector("attention biases and norms", extra)) if extra else tuple(groups)


def rounded_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def gated_mlp(hidden_size: int, intermediate_size: int, bias: bool = False) -> Groups:
    """Gate, up and down projections."""
    groups = (
        column("gate_up_proj", WeightKind.MLP, hidden_size, 2 * intermediate_size),
        row("down_proj", WeightKind.MLP, intermediate_size, hidden_size),
    )
    return (*groups, vector("mlp biases", 2 * intermediate_size + hidden_size)) if bias else groups


def plain_mlp(hidden_size: int, intermediate_size: int) -> Groups:
    """Up and down projections with biases (GPT-2, OPT, Phi)."""
    return (
        column("fc1", WeightKind.MLP, hidden_size, intermediate_size),
        row("fc2", WeightKind.MLP, intermediate_size, hidden_size),
        vector("mlp biases", intermediate_size + hidden_size),
    )


def experts(hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_tok: int) -> Groups:
    """Routed gated experts and the router."""
    per_expert = hidden_size * intermediate_size
    kind, sizes = WeightKind.EXPERT, (hidden_size, intermediate_size)
    return (
        WeightGroup(
            name="experts.gate_up_proj",
            parameters=2 * num_experts * per_expert,
            kind=kind,
            width=2 * num_experts_per_tok * intermediate_size,
            expert_sizes=sizes,
        ),
        WeightGroup(
            name="experts.down_proj",
            parameters=num_experts * per_expert,
            kind=kind,
            width=num_experts_per_tok * intermediate_size,
            expert_sizes=sizes,
        ),
        # Each visited expert's output is kept until they are summed, so its width counts beside the router's matrix.
        attrs.evolve(vector("router", hidden_size * num_experts), width=num_experts_per_tok * hidden_size),
    )


def embedding(name: str, vocab_size: int, hidden_size: int, kind: WeightKind = WeightKind.EMBEDDING) -> WeightGroup:
    """An embedding table, divided over ranks by rows; or the output matrix."""
    return WeightGroup(name=name, parameters=vocab_size * hidden_size, kind=kind)


_ALL_MATRICES = frozenset({WeightKind.ATTENTION, WeightKind.MLP, WeightKind.EXPERT})
_EXPERTS_ONLY = frozenset({WeightKind.EXPERT})


@attrs.frozen(kw_only=True)
class QuantizationScheme:
    """Which matrices of a model are quantised, and to how many bits."""

    name: str  # name by which `quantization` selects it
    bits: int  # size of one quantised weight
    scale_bits: Fraction = Fraction(0)  # bits of the scales (and zero points) per weight that shares them
    # Kinds of matrices that are quantised; embeddings, output matrix, norms and routers never are.
    kinds: frozenset[WeightKind] = _ALL_MATRICES
    expert_bits: int | None = None  # size of one weight of routed experts where it differs
    expert_scale_bits: Fraction | None = None  # and of their scales, where they differ
    left_alone: frozenset[str] = frozenset()  # names of matrices of these kinds that stay in the model's dtype
    unknown: tuple[str, ...] = ()  # what the checkpoint's own list leaves open, in words
    # What an expert's hidden and intermediate size on a rank are rounded up to a multiple of when a server loads them.
    expert_tile: tuple[int, int] | None = None

    def padding_of(self, group: WeightGroup, tensor_parallel_size: int) -> Fraction:
        """How many times as large an expert's matrices are in a server's memory as in the checkpoint."""
        if self.expert_tile is None or group.expert_sizes is None:
            return Fraction(1)
        hidden_size, inner_size = group.expert_sizes
        on_rank = -(-inner_size // tensor_parallel_size)
        padded = rounded_up(hidden_size, self.expert_tile[0]) * rounded_up(on_rank, self.expert_tile[1])
        return Fraction(padded, hidden_size * on_rank)

    def bits_of(self, group: WeightGroup, model_bits: int) -> Fraction:
        """Bits of one parameter of `group`, scales included."""
        if group.kind not in self.kinds or group.name in self.left_alone:
            return Fraction(model_bits)
        if self.expert_bits is None or group.kind is not WeightKind.EXPERT:
            return self.bits + self.scale_bits
        return self.expert_bits + (self.scale_bits if self.expert_scale_bits is None else self.expert_scale_bits)


def quantization_schemes() -> dict[str, QuantizationScheme]:
    """The named schemes. Scale sizes are those of each format's usual groups."""
    schemes = (
        QuantizationScheme(name="fp8", bits=8, unknown=("whether attention is quantised too",)),
        QuantizationScheme(name="fp8_block", bits=8, scale_bits=Fraction(32, 128 * 128)),
        QuantizationScheme(name="int8", bits=8),
        QuantizationScheme(name="int4", bits=4, scale_bits=Fraction(16 + 4, 128)),
        # The tiles of Marlin and TRT-LLM kernels (`mxfp4_round_up_hidden_size_and_intermediate_size` of vLLM 0.32).
        QuantizationScheme(
            name="mxfp4", bits=4, scale_bits=Fraction(8, 32), kinds=_EXPERTS_ONLY, expert_tile=(256, 128)
        ),
        QuantizationScheme(name="nvfp4", bits=4, scale_bits=Fraction(8, 16)),
    )
    return {scheme.name: scheme for scheme in schemes}


def scheme_by_name(name: str) -> QuantizationScheme | None:
    """The scheme called `name`; None for `none`.

    Raises:
        InputError: there is no such scheme.
    """
    if name == "none":
        return None
    scheme = quantization_schemes().get(name)
    if scheme is None:
        raise InputError(f"unknown quantization {name!r}; known: none, {', '.join(quantization_schemes())}")
    return scheme


def scheme_from_config(config: Mapping[str, Any], place: str) -> QuantizationScheme:
    """The scheme of a checkpoint's `quantization_config`.

    Raises:
        InputError: the method is not known here, or lacks its bits.
    """
    method = str(config.get("quant_method", "")).lower()
    nested = config.get("quantization")
    if method.startswith("modelopt") and isinstance(nested, Mapping):
        config = {**config, **cast("Mapping[str, Any]", nested)}
    lists = ("ignored_layers", "ignore", "modules_to_not_convert", "exclude_modules")
    ignored = [str(item) for key in lists for item in _list(config, key)]
    if method in ("fp8", "fbgemm_fp8"):
        scheme = quantization_schemes()["fp8_block" if config.get("weight_block_size") else "fp8"]
        scheme = attrs.evolve(scheme, unknown=())
        if config.get("expert_dtype") == "fp4":
            scheme = attrs.evolve(scheme, expert_bits=4)
    elif method.startswith("modelopt"):
        scheme = _modelopt_scheme(config, place)
    elif method in ("gptq", "awq", "compressed-tensors"):
        scheme = _grouped_scheme(method, config, place)
    elif method == "mxfp4":
        scheme = quantization_schemes()["mxfp4"]
    else:
        raise InputError(
            f"{place}: quantization_config.quant_method is {method!r}, which is not known here; give the weights' bytes"
            f" per GPU (weights_bytes) or a quantization: none, {', '.join(quantization_schemes())}"
        )
    return _without_ignored(scheme, ignored)


def _list(config: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = config.get(key)
    return cast("Sequence[Any]", value) if isinstance(value, list) else ()


def _grouped_scheme(method: str, config: Mapping[str, Any], place: str) -> QuantizationScheme:
    bits, group_size, kind, is_symmetric = config.get("bits"), config.get("group_size"), "int", False
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next(iter(cast("Mapping[str, Any]", groups).values()), None) if isinstance(groups, Mapping) else None
        weights = cast("Mapping[str, Any]", first).get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            raise InputError(f"{place}: quantization_config has no config_groups with weights")
        described = cast("Mapping[str, Any]", weights)
        bits, group_size, kind = described.get("num_bits"), described.get("group_size"), described.get("type", "int")
        is_symmetric = described.get("symmetric") is True
    if not isinstance(bits, int) or bits < 1:
        raise InputError(f"{place}: quantization_config does not say how many bits a weight takes")
    scale_bits = Fraction(0)
    if isinstance(group_size, int) and group_size > 0:
        zero_point = bits if kind == "int" and not is_symmetric else 0
        scale_bits = Fraction((8 if kind == "float" and bits == 4 else 16) + zero_point, group_size)
    return QuantizationScheme(name=f"{method} {bits}-bit", bits=bits, scale_bits=scale_bits)


# Algorithms of ModelOpt (`LINEAR_ALGOS` of vLLM 0.32): bits of a weight, and of its share of a scale.
_MODELOPT = {
    "FP8": (8, Fraction(0)),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, Fraction(0)),
    "FP8_PB_WO": (8, Fraction(32, 128 * 128)),
    "FP8_BLOCK_SCALES": (8, Fraction(32, 128 * 128)),
    "MXFP8": (8, Fraction(8, 32)),
    "NVFP4": (4, Fraction(8, 16)),
    "W4A16_NVFP4": (4, Fraction(8, 16)),
}


def _modelopt_scheme(config: Mapping[str, Any], place: str) -> QuantizationScheme:
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm == "MIXED_PRECISION":
        return _mixed_scheme(config, place)
    bits, scale_bits = _modelopt_bits(algorithm, place)
    return QuantizationScheme(name=f"modelopt {bits}-bit", bits=bits, scale_bits=scale_bits)


def _mixed_scheme(config: Mapping[str, Any], place: str) -> QuantizationScheme:
    """Layers with algorithms of their own (`quantized_layers`): what most matrices of each kind have."""
    layers = cast("Mapping[str, Mapping[str, Any]]", config.get("quantized_layers") or {})
    found: dict[WeightKind, Counter[str]] = {}
    for prefix, recipe in layers.items():
        kind = next((_KINDS_BY_WORD[word] for word in reversed(prefix.split(".")) if word in _KINDS_BY_WORD), None)
        if kind is not None:
            found.setdefault(kind, Counter())[str(recipe.get("quant_algo", "")).upper()] += 1
    if not found:
        raise InputError(
            f"{place}: quantization_config is MIXED_PRECISION without quantized_layers that are known here"
        )
    usual = {kind: counts.most_common(1)[0][0] for kind, counts in found.items()}
    first = next((name for kind, name in usual.items() if kind is not WeightKind.EXPERT), next(iter(usual.values())))
    bits, scale_bits = _modelopt_bits(first, place)
    expert_bits, expert_scale_bits = _modelopt_bits(usual.get(WeightKind.EXPERT, first), place)
    return QuantizationScheme(
        name=f"modelopt mixed, {bits} and {expert_bits} bits",
        bits=bits,
        scale_bits=scale_bits,
        kinds=frozenset(usual),
        expert_bits=expert_bits,
        expert_scale_bits=expert_scale_bits,
    )


def _modelopt_bits(algorithm: str, place: str) -> tuple[int, Fraction]:
    if algorithm not in _MODELOPT:
        raise InputError(
            f"{place}: quantization_config.quant_algo is {algorithm!r}, which is not known here; known are "
            f"{', '.join(_MODELOPT)} and MIXED_PRECISION"
        )
    return _MODELOPT[algorithm]


# Words of module names in lists of unquantised modules, and the kinds that they cover.
_KINDS_BY_WORD = {
    "self_attn": WeightKind.ATTENTION,
    "linear_attn": WeightKind.ATTENTION,
    "mlp": WeightKind.MLP,
    "feed_forward": WeightKind.MLP,
    "experts": WeightKind.EXPERT,
    "shared_experts": WeightKind.MLP,
}
_NEVER_QUANTISED = ("lm_head", "embed", "norm", "router", "gate", "vision", "visual", "projector", "audio", "mtp")


def _without_ignored(scheme: QuantizationScheme, ignored: Sequence[str]) -> QuantizationScheme:
    """Exclude what the checkpoint's own list leaves in full precision; note entries that are not understood."""
    kinds, names, unknown = set(scheme.kinds), set(scheme.left_alone), set[str]()
    for entry in ignored:
        word = entry.replace("*", "").rstrip(".").rsplit(".", 1)[-1].rsplit(":", 1)[-1]
        if "mlp\\.(" in entry:  # every projection of dense MLPs, by a regular expression
            word = "mlp"
        if word in _KINDS_BY_WORD:
            kinds.discard(_KINDS_BY_WORD[word])
        elif word.endswith("_proj"):
            names.add(word)
        elif not any(part in entry for part in _NEVER_QUANTISED):
            unknown.add(f"whether {entry!r} of quantization_config covers matrices counted as quantised")
    return attrs.evolve(
        scheme, kinds=frozenset(kinds), left_alone=frozenset(names), unknown=(*scheme.unknown, *sorted(unknown)[:3])
    )


@attrs.frozen(kw_only=True)
class WeightBytes:
    """Bytes of one rank's weights."""

    num_bytes: int  # bytes with everything quantised that the scheme covers
    padding_bytes: int  # of these, what a server adds to fill the tiles of its kernels
    unquantised_attention_bytes: int  # additional bytes if attention stays in full precision
    parameters: int  # parameters on the rank


def weight_bytes(
    groups: Groups, *, dtype: str, scheme: QuantizationScheme | None, tensor_parallel_size: int
) -> WeightBytes:
    """Bytes of the weights that one rank holds.

    `groups` are the matrices of the rank's pipeline stage; `dtype` is that of unquantised weights.

    Raises:
        InputError: KV heads that can be neither split nor replicated evenly.
    """
    model_bits = BITS_PER_ELEMENT[canonical_dtype(dtype)]
    total, attention, padding, parameters = Fraction(0), Fraction(0), Fraction(0), 0
    for group in groups:
        on_rank = group.on_rank(tensor_parallel_size)
        bits = Fraction(model_bits) if scheme is None else scheme.bits_of(group, model_bits)
        parameters += on_rank
        total += on_rank * bits / 8
        if scheme is not None:
            padding += on_rank * bits / 8 * (scheme.padding_of(group, tensor_parallel_size) - 1)
        if group.kind is WeightKind.ATTENTION:
            attention += on_rank * (model_bits - bits) / 8
    total += padding
    return WeightBytes(
        num_bytes=-(-total.numerator // total.denominator),
        padding_bytes=int(padding),
        parameters=parameters,
        unquantised_attention_bytes=int(attention),
    )
