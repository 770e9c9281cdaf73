"""How many bytes the weights take: which matrices a quantisation scheme compresses, and to what, with their scales.

Quantised weights never change the bytes of the KV cache.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import attrs

from .cache_dtype import BITS_PER_ELEMENT, canonical_dtype
from .errors import InputError
from .model_weights import Groups, WeightGroup, WeightKind

_ALL_MATRICES = frozenset({WeightKind.ATTENTION, WeightKind.MLP, WeightKind.EXPERT})
_EXPERTS_ONLY = frozenset({WeightKind.EXPERT})


@attrs.frozen(kw_only=True)
class QuantizationScheme:
    """What a scheme does to the matrices of a model.

    Attributes:
        name: as `--quantization` takes it.
        bits: of one quantised weight.
        scale_bits: of the scales (and zero points), spread over the weights that share them.
        kinds: kinds of matrices that are quantised; embeddings, output matrix, norms and routers never are.
        expert_bits: bits of routed experts where they differ.
        left_alone: names of matrices that stay in the model's dtype all the same.
        unknown: what the checkpoint's own list leaves open, in words.
    """

    name: str
    bits: int
    scale_bits: Fraction = Fraction(0)
    kinds: frozenset[WeightKind] = _ALL_MATRICES
    expert_bits: int | None = None
    left_alone: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()

    def bits_of(self, group: WeightGroup, model_bits: int) -> Fraction:
        """Bits that one parameter of `group` takes, scales included."""
        if group.kind not in self.kinds or group.name in self.left_alone:
            return Fraction(model_bits)
        bits = self.expert_bits if self.expert_bits is not None and group.kind is WeightKind.EXPERT else self.bits
        return bits + self.scale_bits


def quantization_schemes() -> dict[str, QuantizationScheme]:
    """The schemes that `--quantization` takes, by name. Scale sizes are those of each format's usual groups."""
    schemes = (
        QuantizationScheme(name="fp8", bits=8, unknown=("whether attention is quantised too",)),
        QuantizationScheme(name="fp8_block", bits=8, scale_bits=Fraction(32, 128 * 128)),
        QuantizationScheme(name="int8", bits=8),
        QuantizationScheme(name="int4", bits=4, scale_bits=Fraction(16 + 4, 128)),
        QuantizationScheme(name="mxfp4", bits=4, scale_bits=Fraction(8, 32), kinds=_EXPERTS_ONLY),
        QuantizationScheme(name="nvfp4", bits=4, scale_bits=Fraction(8, 16)),
    )
    return {scheme.name: scheme for scheme in schemes}


def scheme_by_name(name: str) -> QuantizationScheme | None:
    """The scheme of that name; None for `none`.

    Raises:
        InputError: no scheme of that name.
    """
    if name == "none":
        return None
    scheme = quantization_schemes().get(name)
    if scheme is None:
        raise InputError(f"--quantization {name!r} is not known; known are none, {', '.join(quantization_schemes())}")
    return scheme


def scheme_from_config(config: Mapping[str, Any], place: str) -> QuantizationScheme | None:
    """The scheme of a checkpoint's `quantization_config`; None where it quantises nothing.

    Raises:
        InputError: a method that is not known here.
    """
    method = str(config.get("quant_method", "")).lower()
    ignored = [
        str(item) for key in ("ignored_layers", "ignore", "modules_to_not_convert") for item in _list(config, key)
    ]
    if method in ("fp8", "fbgemm_fp8"):
        scheme = quantization_schemes()["fp8_block" if config.get("weight_block_size") else "fp8"]
        scheme = attrs.evolve(scheme, unknown=())
        if config.get("expert_dtype") == "fp4":
            scheme = attrs.evolve(scheme, expert_bits=4)
    elif method in ("gptq", "awq", "compressed-tensors", "modelopt"):
        scheme = _grouped_scheme(method, config, place)
    elif method == "mxfp4":
        scheme = quantization_schemes()["mxfp4"]
    else:
        raise InputError(
            f"{place}: quantization_config.quant_method is {method!r}, which is not known here; give the weights' bytes"
            " per GPU (--weights-bytes) or name the scheme (--quantization)"
        )
    return _without_ignored(scheme, ignored)


def _list(config: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = config.get(key)
    return cast("Sequence[Any]", value) if isinstance(value, list) else ()


def _grouped_scheme(method: str, config: Mapping[str, Any], place: str) -> QuantizationScheme:
    bits, group_size, kind = config.get("bits"), config.get("group_size"), "int"
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next(iter(cast("Mapping[str, Any]", groups).values()), None) if isinstance(groups, Mapping) else None
        weights = cast("Mapping[str, Any]", first).get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            raise InputError(f"{place}: quantization_config has no config_groups with weights")
        described = cast("Mapping[str, Any]", weights)
        bits, group_size, kind = described.get("num_bits"), described.get("group_size"), described.get("type", "int")
    if method == "modelopt":
        algorithm = str(config.get("quant_algo", "")).upper()
        bits, group_size = (4, 16) if algorithm == "NVFP4" else (8, None) if algorithm == "FP8" else (None, None)
        kind = "float"
    if not isinstance(bits, int) or bits < 1:
        raise InputError(f"{place}: quantization_config does not say how many bits a weight takes")
    scale_bits = Fraction(0)
    if isinstance(group_size, int) and group_size > 0:
        zero_point = bits if kind == "int" else 0
        scale_bits = Fraction((8 if kind == "float" and bits == 4 else 16) + zero_point, group_size)
    return QuantizationScheme(name=f"{method} {bits}-bit", bits=bits, scale_bits=scale_bits)


# Words of module names in the lists of what stays unquantised, and what they cover here.
_KINDS_BY_WORD = {
    "self_attn": WeightKind.ATTENTION,
    "linear_attn": WeightKind.ATTENTION,
    "mlp": WeightKind.MLP,
    "feed_forward": WeightKind.MLP,
    "experts": WeightKind.EXPERT,
}
_NEVER_QUANTISED = ("lm_head", "embed", "norm", "router", "gate", "vision", "visual", "projector", "audio", "mtp")


def _without_ignored(scheme: QuantizationScheme, ignored: Sequence[str]) -> QuantizationScheme:
    """Take out what the checkpoint's own list leaves in full precision; what it says in unknown words is noted."""
    kinds, names, unknown = set(scheme.kinds), set(scheme.left_alone), set[str]()
    for entry in ignored:
        word = entry.replace("*", "").rstrip(".").rsplit(".", 1)[-1].rsplit(":", 1)[-1]
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
    """What a rank's weights take, in bytes.

    Attributes:
        num_bytes: with everything that the scheme covers quantised.
        unquantised_attention_bytes: further bytes if attention is left in full precision.
        parameters: that the rank holds.
    """

    num_bytes: int
    unquantised_attention_bytes: int
    parameters: int


def weight_bytes(
    groups: Groups, *, dtype: str, scheme: QuantizationScheme | None, tensor_parallel_size: int
) -> WeightBytes:
    """Bytes of the weights that one rank holds.

    Args:
        groups: matrices of the rank's pipeline stage.
        dtype: of unquantised weights.
        scheme: None: nothing is quantised.
        tensor_parallel_size: ranks that the matrices are divided over.

    Raises:
        InputError: KV heads that can be neither split nor replicated evenly.
    """
    model_bits = BITS_PER_ELEMENT[canonical_dtype(dtype)]
    total, attention, parameters = Fraction(0), Fraction(0), 0
    for group in groups:
        on_rank = group.on_rank(tensor_parallel_size)
        bits = Fraction(model_bits) if scheme is None else scheme.bits_of(group, model_bits)
        parameters += on_rank
        total += on_rank * bits / 8
        if group.kind is WeightKind.ATTENTION:
            attention += on_rank * (model_bits - bits) / 8
    return WeightBytes(
        num_bytes=-(-total.numerator // total.denominator),
        parameters=parameters,
        unquantised_attention_bytes=int(attention),
    )
