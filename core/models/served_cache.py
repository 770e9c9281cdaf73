"""The cache layout that a server takes for a `kv_cache_dtype`, and what its reader should know about it.

The value names no layout by itself where a model's latents are sparse: `fp8` means packed records on one GPU and plain
elements on another (rules of vLLM 0.32's choice of an attention backend; field report A18).
"""

from ..planner.cache_dtype import KEEPS_BOUNDARY_LAYERS, PACKED_LATENT_SIZES, PACKED_LATENTS
from .geometry import ModelGeometry
from .layer_cache import AttentionCache, LatentCache, VectorCache

_PACKED, _PLAIN = "fp8_ds_mla", "fp8_e4m3"
_BOUNDARY_LAYERS = 2  # on either side, in formats that leave them alone
# Architectures whose cache is fp8 on GPUs of compute capability 10.x where no dtype is given.
_EIGHT_BITS_ON_BLACKWELL = ("GlmMoeDsaForCausalLM",)


def served_cache_dtype(geometry: ModelGeometry, kv_cache_dtype: str, cuda_capability: int | None = None) -> str:
    """The `kv_cache_dtype` with its layout: for sparse latents `fp8` becomes `fp8_ds_mla` or `fp8_e4m3`.

    DeepSeek V4 is packed unless a plain dtype is asked for.

    Args:
        geometry: the model.
        kv_cache_dtype: as it was given.
        cuda_capability: ten times the compute capability of the GPU (90: Hopper); 0: no CUDA; None: not known.
    """
    if geometry.has_records and kv_cache_dtype in ("auto", "fp8"):
        return _PACKED
    if not geometry.has_sparse_latents:
        return kv_cache_dtype
    major = None if cuda_capability is None else cuda_capability // 10
    if major == 12 and kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"):
        return _PACKED
    if major == 10 and kv_cache_dtype == "auto" and geometry.architecture in _EIGHT_BITS_ON_BLACKWELL:
        return _PLAIN
    if kv_cache_dtype != "fp8":
        return kv_cache_dtype
    is_packed = major not in (10, 0) and _latent_size(geometry) in PACKED_LATENT_SIZES
    return _PACKED if is_packed else _PLAIN


def cache_notes(geometry: ModelGeometry, given: str, served: str) -> tuple[str, ...]:
    """Sentences about the layout: which one was taken, and sizes that were rounded.

    Args:
        geometry: the model.
        given: the `kv_cache_dtype` as it was given.
        served: the one with its layout (`served_cache_dtype`).
    """
    return (*_layout_notes(geometry, given, served), *_rounding_notes(geometry, served))


def boundary_warning(geometry: ModelGeometry, served: str) -> str | None:
    """What a format with unquantised boundary layers needs beyond what is counted; None for other formats.

    A server leaves the first and last two layers of a model without states in the model's dtype.
    """
    if served not in KEEPS_BOUNDARY_LAYERS or geometry.has_states or geometry.dtype is None:
        return None
    count = geometry.num_hidden_layers
    side = min(_BOUNDARY_LAYERS, count // 2)
    layers = sorted({*range(side), *range(count - side, count)})
    storage, plain = geometry.cache_format(served), geometry.cache_format("auto")
    more = sum(
        cache.floor_bytes(1, plain) - cache.floor_bytes(1, storage)
        for index in layers
        for cache in geometry.layers[index]
    )
    return (
        f"kv_cache_dtype {served} is counted in all {count} layers; vLLM leaves layers {', '.join(map(str, layers))} in"
        f" {geometry.dtype}, which are {more:,} B a token more"
    )


def _latent_size(geometry: ModelGeometry) -> int | None:
    return next((cache.head_size for cache in geometry.caches() if _is_latent(cache)), None)


def _is_latent(cache: object) -> bool:
    return isinstance(cache, LatentCache) and cache.fixed_dtype is None


def _layout_notes(geometry: ModelGeometry, given: str, served: str) -> tuple[str, ...]:
    if geometry.has_records:
        records = {
            f"{record.bytes_per_token} B ({record.formula})"
            for cache in geometry.caches()
            if isinstance(cache, VectorCache) and cache.fixed_dtype is None
            for record in cache.records
            if record.name == served
        }
        if not records:
            return ()
        why = ", as vLLM 0.32 does unless a plain dtype is given" if given != served else ""
        return (f"kv_cache_dtype {given} packs vectors in records ({served}) of {' or '.join(sorted(records))}{why}",)
    if not geometry.has_sparse_latents or not served.startswith(("fp8", "nvfp4")):
        return ()
    size = _latent_size(geometry)
    record = PACKED_LATENTS.get(served)
    if record is not None:
        taken = f"packed records ({record.name}), {record.bytes_per_token} B a token and layer: {record.formula}"
        other = f"; {_PLAIN} is the plain layout, {size} B" if given != served else ""
    else:
        taken = f"plain {served}, {size} B a token and layer"
        other = f"; {_PACKED} is the packed layout, {PACKED_LATENTS[_PACKED].bytes_per_token} B"
    why = ", as vLLM 0.32 chooses on such a GPU" if given != served else ""
    return (f"kv_cache_dtype {given} stores latents as {taken}{why}{other}",)


def _rounding_notes(geometry: ModelGeometry, served: str) -> tuple[str, ...]:
    storage = geometry.cache_format(served)
    per_scale = None if storage.scales is None else storage.scales.elements_per_scale
    if per_scale is None or storage.scales is None:
        return ()
    sizes: set[int] = set()
    for cache in geometry.caches():
        if isinstance(cache, AttentionCache):
            sizes |= {cache.head_size, cache.head_size_v}
        elif isinstance(cache, LatentCache) and cache.fixed_dtype is None:
            sizes.add(cache.head_size)
    return tuple(
        f"kv_cache_dtype {served}: {size} elements are {size / per_scale:g} groups of {per_scale}, so"
        f" {-(-size // per_scale)} scales are counted for each vector"
        for size in sorted(sizes)
        if size % per_scale
    )
