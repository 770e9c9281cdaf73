"""The work of one engine step on one GPU: bytes to read and operations to do, derived from the model alone.

Counts are for one tensor-parallel rank over all layers; a roofline turns them into time.
"""

from collections.abc import Iterable
from itertools import chain

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.models import layer_cache as caches
from ...core.models.config_fields import ConfigFields
from ...core.models.geometry import ModelGeometry
from ...core.models.layer_cache import LayerCache
from ...core.models.weights import QuantizationScheme, WeightGroup, WeightKind, quantization_schemes, scheme_from_config
from ...core.planner.cache_dtype import BITS_PER_ELEMENT, CacheFormat, canonical_dtype
from ...core.planner.parallel import tensor_parallel_spec

_EIGHT_BITS = 8
_MATRICES = frozenset({WeightKind.ATTENTION, WeightKind.MLP})


@attrs.frozen
class AttentionWork:
    """Attention of all layers with the same window, on one rank.

    Operations count for each pair of a sequence or a prompt's token and a token that it attends to: scores and values,
    two operations an element. A prompt takes fewer if latents are expanded to keys and values first, which pays off
    over many tokens.
    """

    window: int | None  # the most tokens that a token attends to; None: all tokens before it
    kv_bytes_per_token: float  # bytes read for each token that a decoding sequence attends to
    decode_flops_per_pair: float
    prefill_flops_per_pair: float


@attrs.frozen(kw_only=True)
class ExpertWork:
    """Routed experts of all layers that have them, on one rank."""

    num_layers: int  # layers with experts
    num_experts: int  # experts per layer
    experts_per_token: int  # experts that a token visits per layer
    bytes_per_expert: float  # bytes of one expert in every layer
    flops_per_visit: float  # operations for one token in one expert of every layer
    in_eight_bits: bool  # whether products run on 8-bit units if the device has them

    def expected_distinct(self, num_tokens: NDArray[np.int64], skew: float) -> NDArray[np.float64]:
        """Mean number of a layer's experts that `num_tokens` tokens visit at least once: float64, as `num_tokens`.

        Each token visits expert i with probability q(i) ~ i ** -skew, at most 1, `experts_per_token` in total, and
        independently of the others: `sum(1 - (1 - q(i)) ** num_tokens)`.
        """
        visited = expert_visit_probabilities(self.num_experts, self.experts_per_token, skew)
        return np.sum(1 - (1 - visited) ** num_tokens[:, None], axis=1)


def expert_visit_probabilities(num_experts: int, experts_per_token: int, skew: float) -> NDArray[np.float64]:
    """Probability that a token visits expert i: float64 `[num_experts]`; the sum is `experts_per_token`."""
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    visited = np.zeros(num_experts)
    certain = 0
    while True:
        rest = weights[certain:]
        visited[certain:] = (experts_per_token - certain) * rest / rest.sum()
        if certain >= experts_per_token or visited[certain] <= 1:
            return visited
        visited[certain] = 1.0
        certain += 1


@attrs.frozen(kw_only=True)
class StepWork:
    """The work of a step of one model on one tensor-parallel rank."""

    num_layers: int  # decoder layers
    matrix_bytes: float  # weights of all layers without experts; read once a step
    flops_per_token: float  # operations of their products in the model's precision
    eight_bit_flops_per_token: float  # operations of the products whose weights and activations have 8 bits
    head_bytes: float  # bytes of the output matrix
    head_flops_per_token: float  # operations of its product, for each sampled token
    attention: tuple[AttentionWork, ...]  # attention work, one entry per window
    experts: ExpertWork | None  # None for a dense model
    state_bytes_per_sequence: float  # states of fixed size that a decoding sequence reads and writes
    all_reduce_bytes_per_token: float  # bytes of one token's hidden vector
    vocab_size: int  # logits of a sampled token


def weights_format(geometry: ModelGeometry, weights_dtype: str) -> tuple[int, QuantizationScheme | None]:
    """Bits of an unquantized weight, and the scheme of the quantized ones.

    `weights_dtype` is a dtype (`bf16`), a scheme (`fp8`, `int4`, `mxfp4`, ...; `none`), or `auto`: what the config
    says. Raises `InputError` for anything else, or for `auto` where the config names no dtype.
    """
    if weights_dtype == "none":  # unquantized, whatever the config says
        return _model_bits(geometry), None
    if weights_dtype in quantization_schemes():
        return _model_bits(geometry), quantization_schemes()[weights_dtype]
    if weights_dtype != "auto":
        return BITS_PER_ELEMENT[canonical_dtype(weights_dtype)], None
    scheme = None
    if geometry.quantization_config is not None:
        scheme = scheme_from_config(geometry.quantization_config, geometry.name)
    return _model_bits(geometry), scheme


def _model_bits(geometry: ModelGeometry) -> int:
    if geometry.dtype is None:
        raise InputError(f"{geometry.name}: its config names no dtype; give the weights' dtype, for instance bf16")
    return BITS_PER_ELEMENT[geometry.dtype]


def step_work(
    geometry: ModelGeometry,
    *,
    tensor_parallel_size: int,
    weights_dtype: str,
    kv_cache_dtype: str,
    decode_context_parallel_size: int = 1,
) -> StepWork:
    """Count the work of a step of `geometry` on one tensor-parallel rank.

    Under decode context parallelism a rank reads its share of each request's tokens. Products cost two operations per
    parameter and token. Sparse attention counts as full attention, and a quantized weight with fewer than 8 bits
    computes in the model's precision.

    Raises:
        InputError: parameters, heads or a dtype are not known, or the ranks do not divide the heads.
    """
    model_bits, scheme = weights_format(geometry, weights_dtype)
    weights, ranks = geometry.weights, tensor_parallel_size
    matrix_bytes, flops, eight_bit_flops = 0.0, 0.0, 0.0
    for group in (group for layer in weights.layers for group in layer if group.kind is not WeightKind.EXPERT):
        parameters = group.on_rank(ranks)
        bits = _bits(group, model_bits, scheme)
        matrix_bytes += parameters * bits / 8
        if group.kind in _MATRICES:
            flops += 2 * parameters * (bits != _EIGHT_BITS)
            eight_bit_flops += 2 * parameters * (bits == _EIGHT_BITS)
    head = geometry.vocab_size * geometry.hidden_size / ranks
    storage = geometry.cache_format(kv_cache_dtype)
    states = (cache for cache in _caches(geometry) if isinstance(cache, caches.SequenceStateCache))
    return StepWork(
        num_layers=geometry.num_hidden_layers,
        matrix_bytes=matrix_bytes,
        flops_per_token=flops,
        eight_bit_flops_per_token=eight_bit_flops,
        head_bytes=head * model_bits / 8,
        head_flops_per_token=2 * head,
        attention=tuple(
            attrs.evolve(attention, kv_bytes_per_token=attention.kv_bytes_per_token / decode_context_parallel_size)
            for attention in attention_work(geometry, ranks, storage, _caches(geometry))
        ),
        experts=_expert_work(geometry, ranks, model_bits, scheme),
        state_bytes_per_sequence=2.0 * sum(bytes_per_token(cache, ranks, storage) for cache in states),
        all_reduce_bytes_per_token=geometry.hidden_size * model_bits / 8,
        vocab_size=geometry.vocab_size,
    )


def _bits(group: WeightGroup, model_bits: int, scheme: QuantizationScheme | None) -> float:
    return model_bits if scheme is None else float(scheme.bits_of(group, model_bits))


def _expert_work(
    geometry: ModelGeometry, ranks: int, model_bits: int, scheme: QuantizationScheme | None
) -> ExpertWork | None:
    layers = [layer for layer in geometry.weights.layers if any(group.kind is WeightKind.EXPERT for group in layer)]
    if not layers:
        return None
    # The router has a row for each expert; its width counts the outputs of the experts that a token visits.
    router = next(group for group in layers[0] if group.name == "router")
    num_experts = router.parameters // geometry.hidden_size
    groups = [group for layer in layers for group in layer if group.kind is WeightKind.EXPERT]
    parameters = sum(group.parameters for group in groups) / num_experts / ranks
    bits = _bits(groups[0], model_bits, scheme)
    return ExpertWork(
        num_layers=len(layers),
        num_experts=num_experts,
        experts_per_token=router.width // geometry.hidden_size,
        bytes_per_expert=parameters * bits / 8,
        flops_per_visit=2 * parameters,
        in_eight_bits=bits == _EIGHT_BITS,
    )


def _caches(geometry: ModelGeometry) -> Iterable[LayerCache]:
    return chain.from_iterable(geometry.layers)


def bytes_per_token(cache: LayerCache, ranks: int, storage: CacheFormat) -> float:
    """Bytes of one token in a layer's cache on one rank; of a state, its bytes."""
    tokens = cache.tokens_per_state if isinstance(cache, caches.CompressedCache) else 1
    return tensor_parallel_spec(cache.spec(tokens, storage), ranks).page_size_bytes / tokens


def attention_work(
    geometry: ModelGeometry, ranks: int, storage: CacheFormat, layer_caches: Iterable[LayerCache]
) -> tuple[AttentionWork, ...]:
    """The attention of layers with these caches on one of `ranks` tensor-parallel ranks; states have none.

    Raises InputError: the ranks do not divide the heads, or the cost of a cache's attention is not known.
    """
    num_heads = geometry.fields.integer("num_attention_heads", "n_head")
    if num_heads % ranks:
        raise InputError(
            f"{geometry.name}: {num_heads} attention heads cannot be divided over tensor_parallel_size {ranks}"
        )
    flops = 2 * num_heads / ranks
    totals: dict[int | None, AttentionWork] = {}
    for cache in layer_caches:
        if cache.part is caches.CachePart.STATE:
            continue
        window = getattr(cache, "sliding_window", None) or getattr(cache, "attention_chunk_size", None)
        so_far = totals.get(window, AttentionWork(window, 0.0, 0.0, 0.0))
        totals[window] = AttentionWork(
            window,
            so_far.kv_bytes_per_token + bytes_per_token(cache, ranks, storage),
            so_far.decode_flops_per_pair + flops * _elements_per_pair(cache),
            so_far.prefill_flops_per_pair + flops * _expanded_elements_per_pair(cache, geometry.fields),
        )
    return tuple(totals.values())


def _elements_per_pair(cache: LayerCache) -> int:
    """Elements that a head multiplies for one pair of tokens: a key and a value; a latent is used as both."""
    if isinstance(cache, caches.AttentionCache):
        return cache.head_size + cache.head_size_v
    if cache.part is caches.CachePart.INDEXER:
        return cache.head_size if isinstance(cache, caches.LatentCache | caches.CompressedCache) else 0
    if isinstance(cache, caches.LatentCache | caches.WindowBufferCache):
        return 2 * cache.head_size
    if isinstance(cache, caches.CompressedCache):
        return 2 * cache.head_size // cache.tokens_per_state
    raise InputError(f"what attention over a {type(cache).__name__} costs is not known here")


def _expanded_elements_per_pair(cache: LayerCache, fields: ConfigFields) -> int:
    """The same in a prompt, where MLA's latents are expanded to a key and a value per head."""
    expanded = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    is_latent = isinstance(cache, caches.LatentCache) and cache.part is caches.CachePart.KV
    if is_latent and all(fields.has(name) for name in expanded):
        return sum(fields.integers(*expanded))
    return _elements_per_pair(cache)
